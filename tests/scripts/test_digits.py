"""The demo's data: fixed, complete and readable."""

import cv2
import numpy as np
from mxnet import recordio
from sklearn.datasets import load_digits
from support import digits


def _records(folder, name):
    reader = recordio.MXIndexedRecordIO(str(folder / f"{name}.idx"), str(folder / f"{name}.rec"), "r")
    return [recordio.unpack_img(reader.read_idx(key), cv2.IMREAD_COLOR) for key in reader.keys]


def test_same_bytes_every_time(tmp_path):
    assert digits.make(tmp_path / "a") == digits.make(tmp_path / "b") == (1437, 360)
    for name in ("train.rec", "train.idx", "val.rec", "val.idx"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_every_digit_once_and_every_class_in_both_sets(tmp_path):
    digits.make(tmp_path)
    train, val = _records(tmp_path, "train"), _records(tmp_path, "val")
    labels = {name: [int(header.label) for header, _ in records] for name, records in zip("tv", (train, val))}
    assert sorted(labels["t"] + labels["v"]) == sorted(load_digits().target)
    assert set(labels["t"]) == set(labels["v"]) == set(range(10))
    assert len({image.tobytes() for _, image in train + val}) == 1797


def test_pixels_survive_the_packing(tmp_path):
    digits.make(tmp_path)
    (images, labels), _ = digits.load(32)
    header, image = _records(tmp_path, "train")[7]
    assert header.label == labels[7]
    np.testing.assert_array_equal(image, images[7])
