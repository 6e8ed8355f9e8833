"""ImageNet-style RecordIO: a check of the files before training, and one fresh iterator an epoch."""

import argparse
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import mxnet as mx

from .errors import UserError

MAGIC = 0xCED7230A
FRAME = struct.Struct("<II")  # magic, 3 bits of continuation + 29 bits of length
HEADER = struct.Struct("<IfQQ")  # mx.recordio.IRHeader: flag, label, id, id2
CHECKED_RECORDS = 100_000

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
    """Checks framing and labels of a .rec file: every record, or 100,000 spread evenly over a larger one."""
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
        raise UserError(
            f"{path}: corrupt: {size} bytes is no multiple of 4, so the file was cut or is no RecordIO"
        )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        if index_path.is_file():
            offsets = _read_index(index_path)
            _check_sample(path, buffer, offsets, num_classes)
            return Records(path, str(index_path), len(offsets))
        return Records(path, "", _check_all(path, buffer, num_classes))


def _read_index(path: Path) -> List[int]:
    try:
        offsets = [int(line.split("\t")[1]) for line in path.read_text().splitlines() if line]
    except (IndexError, ValueError):
        raise UserError(f"{path}: corrupt: not every line is a number, a tab and an offset") from None
    if not offsets:
        raise UserError(f"{path}: the data set is empty (no line)")
    return offsets


def _check_sample(path: Path, buffer: mmap.mmap, offsets: List[int], num_classes: int) -> None:
    step = -(-len(offsets) // CHECKED_RECORDS)
    for number in sorted({*range(0, len(offsets), step), len(offsets) - 1}):
        _check_record(path, buffer, number, offsets[number], num_classes)


def _check_all(path: Path, buffer: mmap.mmap, num_classes: int) -> int:
    offset = count = 0
    while offset < len(buffer):
        offset = _check_record(path, buffer, count, offset, num_classes)
        count += 1
    return count


def _check_record(path: Path, buffer: mmap.mmap, number: int, offset: int, num_classes: int) -> int:
    """Checks the record at `offset` and returns where the next one starts."""
    start = offset + FRAME.size
    while True:
        if not 0 <= offset <= len(buffer) - FRAME.size:
            raise UserError(
                f"{path}: corrupt: record {number} at byte {offset} is beyond the file's {len(buffer)} bytes"
            )
        magic, word = FRAME.unpack_from(buffer, offset)
        part, length = word >> 29, word & (1 << 29) - 1
        if magic != MAGIC:
            raise UserError(
                f"{path}: corrupt: no record {number} at byte {offset} (not RecordIO, or another file's .idx)"
            )
        offset += FRAME.size + (length + 3 & ~3)
        if offset > len(buffer):
            raise UserError(
                f"{path}: corrupt: record {number} ends at byte {offset}, the file at {len(buffer)}"
            )
        if part in (0, 1):
            _check_label(
                path, buffer[start : min(start + length, start + HEADER.size + 4)], number, num_classes
            )
        if part in (0, 3):
            return offset


def _check_label(path: Path, head: bytes, number: int, num_classes: int) -> None:
    if len(head) <= HEADER.size:
        raise UserError(f"{path}: corrupt: record {number} holds no image")
    labels, label, _, _ = HEADER.unpack_from(head)
    if labels:
        (label,) = struct.unpack_from("<f", head, HEADER.size)
    if not (0 <= label < num_classes and label == int(label)):
        raise UserError(
            f"{path}: record {number} has label {label:g}; "
            f"allowed: 0 to {num_classes - 1} (--num-classes {num_classes})"
        )


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


def train_batches(
    records: Records, options: argparse.Namespace, batch_size: int, epoch: int
) -> Iterator[Batch]:
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
