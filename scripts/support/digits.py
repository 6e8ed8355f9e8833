"""Packs scikit-learn's 1,797 handwritten digits into train.rec and val.rec with MXNet's recordio tools.

The split is fixed (four in five of each digit train), the images are PNG (lossless), so the same
libraries write the same bytes. The digits are real: 8x8 counts of ink from scans of 43 people's handwriting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Tuple

import cv2
import numpy as np
from mxnet import recordio
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from support.options import parse

Arrays = Tuple[np.ndarray, np.ndarray]


def load(size: int) -> tuple[Arrays, Arrays]:
    """Return (images, labels) to train on and to validate on; images are (n, size, size, 3) bytes."""
    digits = load_digits()
    ink = np.clip(digits.images * 16, 0, 255).astype(np.uint8)
    grey = np.stack([cv2.resize(image, (size, size), interpolation=cv2.INTER_CUBIC) for image in ink])
    train, val = train_test_split(
        np.arange(len(grey)), test_size=360, stratify=digits.target, random_state=0, shuffle=True
    )
    images = np.repeat(grey[..., None], 3, axis=3)
    return (images[train], digits.target[train]), (images[val], digits.target[val])


def write(folder: Path, name: str, arrays: Arrays) -> int:
    """Write name.rec and name.idx and return the number of records."""
    writer = recordio.MXIndexedRecordIO(str(folder / f"{name}.idx"), str(folder / f"{name}.rec"), "w")
    for number, (image, label) in enumerate(zip(*arrays)):
        header = recordio.IRHeader(0, float(label), number, 0)
        writer.write_idx(number, recordio.pack_img(header, image, quality=9, img_fmt=".png"))
    writer.close()
    return len(arrays[0])


def make(folder: Path, size: int = 32) -> tuple[int, int]:
    """Write both sets and return their sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    train, val = load(size)
    return write(folder, "train", train), write(folder, "val", val)


def main(arguments: list[str] | None = None) -> None:
    size = (32, "width and height of the images (default: 32)")
    args = parse(__doc__, arguments, "folder", folder=Path("digits"), size=size)
    print("{}: {} digits to train on, {} to validate on".format(args.folder, *make(args.folder, args.size)))
