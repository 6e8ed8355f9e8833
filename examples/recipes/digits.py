"""Real handwritten digits for the recipes of vision: single ones, and several on a canvas.

They are the 1,797 digits that ship in scikit-learn (UCI's optical recognition of handwritten digits, CC BY 4.0):
8x8 counts of ink from scans of 43 people's handwriting. Which of them are held out for tests is fixed.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import cv2
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

CLASSES = [str(digit) for digit in range(10)]
HELD_OUT = 0.3


def split(size: int) -> Sequence[np.ndarray]:
    """Return ink of shape (n, size, size) from 0 to 1 and labels to train on, then those held out."""
    data = load_digits()
    ink = np.stack([cv2.resize(image / 16, (size, size), interpolation=cv2.INTER_CUBIC) for image in data.images])
    ink = ink.clip(0, 1).astype("float32")
    labels = data.target.astype("float32")
    ink, held, labels, truth = train_test_split(ink, labels, test_size=HELD_OUT, stratify=labels, random_state=0)
    return ink, labels, held, truth


def moved(ink: np.ndarray, copies: int) -> np.ndarray:
    """Return ink of shape (copies * n, size, size): the pictures, then copies that are moved, turned and scaled."""
    random, size = np.random.RandomState(0), ink.shape[1]
    made = [ink]
    for _ in range(copies - 1):
        for picture in ink:
            turn = cv2.getRotationMatrix2D(((size - 1) / 2,) * 2, random.uniform(-8, 8), random.uniform(0.9, 1.1))
            turn[:, 2] += random.uniform(-size / 10, size / 10, 2)
            made.append(cv2.warpAffine(picture, turn, (size, size))[None])
    return np.concatenate(made)


class Canvases(NamedTuple):
    """Images with up to ``most`` digits each; boxes and ids are -1 where there are fewer.

    ``images`` (n, 3, size, size) from -1 to 1; ``boxes`` (n, most, 4), in pixels; ``ids`` (n, most, 1), classes;
    ``masks`` (n, most, size, size), 1 where a digit has ink.
    """

    images: np.ndarray
    boxes: np.ndarray
    ids: np.ndarray
    masks: np.ndarray


def canvases(count: int, held_out: bool, seed: int, size: int = 64, most: int = 3) -> Canvases:
    """Return canvases with 1 to ``most`` digits of 14 to 30 pixels each, which do not overlap, on noise."""
    ink, labels = split(16)[2 * held_out : 2 * held_out + 2]
    random = np.random.RandomState(seed)
    images = random.uniform(0, 0.3, (count, size, size)).astype("float32")
    boxes, ids = np.full((count, most, 4), -1, "float32"), np.full((count, most, 1), -1, "float32")
    masks = np.zeros((count, most, size, size), "float32")
    for n in range(count):
        for place in range(random.randint(1, most + 1)):
            for _ in range(20):  # tries to find room
                which, width = random.randint(len(ink)), random.randint(14, 31)
                x, y = random.randint(0, size - width, 2)
                box = [x, y, x + width, y + width]
                if not any(overlaps(box, other) for other in boxes[n, :place]):
                    break
            else:
                break
            digit = cv2.resize(ink[which], (width, width))
            rows, columns = np.nonzero(digit > 0.3)
            masks[n, place, y : y + width, x : x + width] = digit > 0.3
            boxes[n, place] = x + columns.min(), y + rows.min(), x + columns.max() + 1, y + rows.max() + 1
            ids[n, place] = labels[which]
            window = images[n, y : y + width, x : x + width]
            np.maximum(window, digit, out=window)
    return Canvases(np.repeat(images[:, None] * 2 - 1, 3, axis=1), boxes, ids, masks)


def overlaps(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether two boxes of left, top, right and bottom overlap."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
