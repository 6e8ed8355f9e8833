"""Bad input to the example: status 2 and one line that names what was given and what is allowed."""

import shutil
import struct

import pytest
from support.digits import write


def _one_line(result, *words):
    assert result.status == 2
    assert result.error.startswith("error: ")
    assert not any("Traceback" in line for line in result.lines)
    for word in words:
        assert word in result.error


@pytest.fixture
def copy(digits, tmp_path):
    """A copy of the digits that a test may damage."""
    return shutil.copytree(digits, tmp_path / "copy")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float8"}, ["--dtype", "float8", "float16", "bfloat16"]),
        ({"dtype": "float16", "policy": "fp16"}, ["--policy fp16", "no recipe", "float16-fast"]),
        ({"dtype": "float32", "policy": "float16-fast"}, ["--policy float16-fast", "--dtype float16"]),
        ({"model": "resnet20_v1b"}, ["resnet20_v1b", "close names", "resnet"]),
        ({"model": "yolo3_darknet53_voc"}, ["yolo3_darknet53_voc", "classification"]),
        ({"model": "inceptionv3"}, ["--input-size 16", "inceptionv3"]),
        ({"model": "hrnet_w18_small_v1_c", "input_size": 64}, ["hrnet_w18_small_v1_c", "(1, 1000)", "(1, 10)"]),
        ({"model": "alexnet", "last_gamma": True}, ["alexnet", "last_gamma"]),
        ({"policy": "nowhere.json", "dtype": "bfloat16"}, ["--policy nowhere.json", "No such file"]),
        ({"policy": "float16", "dtype": "bfloat16"}, ["--policy float16", "--dtype float16, not bfloat16"]),
        ({"batch_size": 0}, ["--batch-size", "'0'", "from 1"]),
        ({"loss_scale": "-3"}, ["--loss-scale", "-3", "dynamic"]),
        ({"lr_mode": "linear"}, ["--lr-mode", "linear", "cosine"]),
        ({"lr_decay_epoch": "1,x"}, ["--lr-decay-epoch", "1,x", "30,60,90"]),
        ({"warmup_epochs": 2}, ["--warmup-epochs 2", "--num-epochs 2"]),
        ({"crop_ratio": 1.5}, ["--crop-ratio 1.5"]),
        ({"num_gpus": 99}, ["--num-gpus 99", "allowed: 0 to"]),
        ({"resume_epoch": 1}, ["--resume-epoch 1", "--resume-params"]),
        ({"resume_params": "nothing.params"}, ["--resume-params", "nothing.params", "no such file"]),
        ({"unknown": 1}, ["--unknown"]),
    ],
    ids=lambda value: " ".join(map(str, value.items())) if isinstance(value, dict) else "",
)
def test_option(run, changes, words):
    _one_line(run(**changes), *words)


def test_missing_files(run, digits, tmp_path):
    _one_line(run(rec_train=tmp_path / "none.rec"), "none.rec", "no such file")
    _one_line(run(rec_val_idx=tmp_path / "none.idx"), "none.idx", "no such file")


def test_empty_data_set(run, tmp_path):
    write(tmp_path, "empty", ([], []))
    _one_line(run(rec_train=tmp_path / "empty.rec"), "empty.rec", "empty")


def test_cut_file(run, copy):
    whole = (copy / "val.rec").read_bytes()
    (copy / "val.rec").write_bytes(whole[:-48])
    _one_line(run(rec_val=copy / "val.rec"), "val.rec", "corrupt", "record 21")
    (copy / "val.rec").write_bytes(whole[:-3])
    _one_line(run(rec_val=copy / "val.rec"), "val.rec", "corrupt", "multiple of 4")


@pytest.mark.parametrize("index", [True, False])
def test_no_record_file(run, copy, index):
    (copy / "val.rec").write_bytes(b"JFIF" * 100_000)
    if not index:
        (copy / "val.idx").unlink()
    _one_line(run(rec_val=copy / "val.rec"), "val.rec", "corrupt", "record 0")


def test_index_of_another_file(run, copy):
    shutil.copy(copy / "train.idx", copy / "val.idx")
    _one_line(run(rec_val=copy / "val.rec"), "val.rec", "corrupt")
    (copy / "val.idx").write_text("one two\n")
    _one_line(run(rec_val=copy / "val.rec"), "val.idx", "corrupt")


def test_works_without_index(run, copy):
    (copy / "train.idx").unlink()
    assert run(rec_train=copy / "train.rec", num_epochs=1).status == 0


def _damage(copy, record, at, content):
    """Write into a record of train.rec, ``at`` bytes behind its beginning."""
    offset = int((copy / "train.idx").read_text().splitlines()[record].split("\t")[1]) + at
    data = bytearray((copy / "train.rec").read_bytes())
    data[offset : offset + len(content)] = content
    (copy / "train.rec").write_bytes(bytes(data))


@pytest.mark.parametrize("label", [10.0, -1.0, 2.5, float("nan")])
def test_label_outside_the_classes(run, copy, label):
    _damage(copy, 17, 12, struct.pack("<f", label))
    _one_line(run(rec_train=copy / "train.rec"), "train.rec", "record 17", f"label {label:g}", "0 to 9")


def test_image_that_does_not_decode(run, copy):
    _damage(copy, 3, 32, bytes(32))
    _one_line(run(rec_train=copy / "train.rec"), "train.rec", "decode")


def test_foreign_checkpoint(run, copy):
    _one_line(run(resume_params=copy / "train.rec"), "--resume-params", "train.rec")
