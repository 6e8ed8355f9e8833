"""ImageNet-style RecordIO: a check of the files before training, and one fresh iterator an epoch."""

import argparse
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, NoReturn, Optional

import cv2
import mxnet as mx
import numpy as np

from .errors import UserError

MAGIC = 0xCED7230A
FRAME = struct.Struct("<II")  # magic, 3 bits of continuation + 29 bits of length
HEADER = struct.Struct("<IfQQ")  # mx.recordio.IRHeader: flag, label, id, id2
CHECKED_RECORDS = 100_000
DECODED_IMAGES = 2_000

MEAN = {"mean_r": 123.68, "mean_g": 116.779, "mean_b": 103.939}
STD = {"std_r": 58.393, "std_g": 57.12, "std_b": 57.375}


@dataclass(frozen=True)
class Records:
    """A .rec file that passed the check. `index` is empty where there is no .idx file."""

    path: Path
    index: str
    count: int


@dataclass(frozen=True)
class Batch:
    """`data` and `label` are full batches; the first `valid` rows are new, the rest fill the last batch."""

    data: mx.nd.NDArray
    label: mx.nd.NDArray
    valid: int


def open_records(path: Path, index: Optional[Path], num_classes: int) -> Records:
    """Checks framing and label of every record (of 100,000 in a larger file), and decodes 2,000 images."""
    path = path.expanduser()
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a .rec made by MXNet's im2rec.py")
    index_path = index.expanduser() if index else path.with_suffix(".idx")
    if index and not index_path.is_file():
        raise UserError(f"{index_path}: no such file; give the .idx that im2rec.py wrote beside {path.name}")
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{path}: the data set is empty (0 bytes)")
    if size % 4:
        raise UserError(f"{path}: corrupt: {size} bytes is no multiple of 4, so the file was cut or is no RecordIO")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        check = _Check(path, buffer, num_classes)
        if index_path.is_file():
            offsets = _read_index(index_path)
            check.sample(offsets)
            return Records(path, str(index_path), len(offsets))
        return Records(path, "", check.all())


def _read_index(path: Path) -> List[int]:
    try:
        offsets = [int(line.split("\t")[1]) for line in path.read_text().splitlines() if line]
    except (IndexError, ValueError):
        raise UserError(f"{path}: corrupt: not every line is a number, a tab and an offset") from None
    if not offsets:
        raise UserError(f"{path}: the data set is empty (no line)")
    return offsets


class _Check:
    """What is wrong with a record, said with its number."""

    def __init__(self, path: Path, buffer: mmap.mmap, num_classes: int) -> None:
        self.path, self.buffer, self.num_classes = path, buffer, num_classes

    def sample(self, offsets: List[int]) -> None:
        """The records at `offsets`, or CHECKED_RECORDS of them spread evenly."""
        step = -(-len(offsets) // CHECKED_RECORDS)
        decoded = -(-len(offsets) // DECODED_IMAGES)
        for number in sorted({*range(0, len(offsets), step), len(offsets) - 1}):
            self.record(number, offsets[number], decode=number % decoded == 0)

    def all(self) -> int:
        """Every record from the start of the file; returns how many there are."""
        offset = count = 0
        while offset < len(self.buffer):
            offset = self.record(count, offset, decode=count < DECODED_IMAGES)
            count += 1
        return count

    def record(self, number: int, offset: int, decode: bool) -> int:
        """Checks the record at `offset` and returns where the next one starts."""
        start, size = offset + FRAME.size, len(self.buffer)
        while True:
            if not 0 <= offset <= size - FRAME.size:
                self.corrupt(f"record {number} at byte {offset} is beyond the file's {size} bytes")
            magic, word = FRAME.unpack_from(self.buffer, offset)
            part, length = word >> 29, word & (1 << 29) - 1
            if magic != MAGIC:
                self.corrupt(f"no record {number} at byte {offset} (not RecordIO, or another file's .idx)")
            offset += FRAME.size + (length + 3 & ~3)
            if offset > size:
                self.corrupt(f"record {number} ends at byte {offset}, the file at {size}")
            if part in (0, 1):
                image = start + self.label(number, self.buffer[start : start + min(length, HEADER.size + 4)])
                if part == 0:
                    self.image(number, image, start + length, decode)
            if part in (0, 3):
                return offset

    def label(self, number: int, head: bytes) -> int:
        """Checks the label and returns how many bytes stand in front of the image."""
        if len(head) <= HEADER.size:
            self.corrupt(f"record {number} holds no image")
        labels, label, _, _ = HEADER.unpack_from(head)
        if labels:
            (label,) = struct.unpack_from("<f", head, HEADER.size)
        if not (0 <= label < self.num_classes and label == int(label)):
            allowed = f"0 to {self.num_classes - 1} (--num-classes {self.num_classes})"
            raise UserError(f"{self.path}: record {number} has label {label:g}; allowed: {allowed}")
        return HEADER.size + 4 * labels

    def image(self, number: int, start: int, end: int, decode: bool) -> None:
        """An image that does not decode can end the process inside ImageRecordIter."""
        known = self.buffer[start : start + 4].startswith((b"\xff\xd8\xff", b"\x89PNG"))
        if known and not decode:
            return
        data = np.frombuffer(self.buffer[start:end], np.uint8)
        if not data.size or cv2.imdecode(data, cv2.IMREAD_COLOR) is None:
            self.corrupt(f"the image of record {number} does not decode")

    def corrupt(self, reason: str) -> NoReturn:
        raise UserError(f"{self.path}: corrupt: {reason}")


def _augmentation(kind: str, size: int) -> Dict[str, Any]:
    if kind == "imagenet":
        return {
            "rand_mirror": True,
            "random_resized_crop": True,
            "max_aspect_ratio": 4 / 3,
            "min_aspect_ratio": 3 / 4,
            "max_random_area": 1.0,
            "min_random_area": 0.08,
            "brightness": 0.4,
            "saturation": 0.4,
            "contrast": 0.4,
            "pca_noise": 0.1,
        }
    if kind == "shift":
        return {"resize": size, "pad": size // 8, "fill_value": 0, "rand_crop": True}
    return {"resize": size}


def train_batches(records: Records, options: argparse.Namespace, batch_size: int, epoch: int) -> Iterator[Batch]:
    """One epoch in the order, and with the augmentation, that `--seed` and the epoch give."""
    seed = options.seed * 1000 + epoch
    extra = _augmentation(options.augment, options.input_size)
    return _batches(records, options, batch_size, shuffle=True, seed=seed, seed_aug=seed, **extra)


def val_batches(records: Records, options: argparse.Namespace, batch_size: int) -> Iterator[Batch]:
    """Every sample once, centre crop."""
    return _batches(records, options, batch_size, resize=round(options.input_size / options.crop_ratio))


def _batches(records: Records, options: argparse.Namespace, batch_size: int, **extra: Any) -> Iterator[Batch]:
    """A new ImageRecordIter each time: a reset one leaves out the samples that filled its last batch."""
    iterator = mx.io.ImageRecordIter(
        path_imgrec=str(records.path),
        path_imgidx=records.index,
        data_shape=(3, options.input_size, options.input_size),
        batch_size=batch_size,
        preprocess_threads=options.num_workers,
        verbose=False,
        **MEAN,
        **STD,
        **extra,
    )
    seen = 0
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except mx.base.MXNetError as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(f"{records.path}: MXNet cannot decode an image in it: {reason}") from None
        valid = min(batch_size, records.count - seen)
        seen += valid
        yield Batch(batch.data[0], batch.label[0], valid)
