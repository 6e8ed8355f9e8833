"""On a full disk every writer says so, and the file of before is still there, whole."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager

import mxnet as mx
import numpy as np
import pytest
from kit.killed import killed_everywhere
from kit.modules import WIDE, wide, wide_bucketing
from kit.twins import MASTERS
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.__main__ import main
from mxmp.tuning import machine


def test_a_pipe_or_device_is_never_replaced_by_a_file(tmp_path):
    """As root, ``/dev/null`` would become a file."""
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    with pytest.raises(OSError, match="a device or pipe cannot be replaced") as caught:
        mxmp.explain(mx.sym.var("data"), policy="float16").graphs[0].plan.save(path)
    assert caught.value.filename == path
    assert os.listdir(tmp_path) == ["pipe"]
    assert not os.path.isfile(path)


def seeded(net):
    net.initialize(mx.init.Uniform(0.5))
    return net


def array(seed, *shape):
    return mx.nd.array(np.random.RandomState(seed).randn(*shape))


@contextmanager
def full_after(size):
    """No file grows beyond ``size`` bytes, as if the disk were full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def module(policy="float16"):
    made = mxmp.Module(wide(), policy=policy)
    made.bind([("data", (4, WIDE))], [("softmax_label", (4,))])
    made.init_params()
    made.init_optimizer(optimizer="adam")
    made.forward_backward(mx.io.DataBatch([array(0, 4, WIDE)], [mx.nd.array([0, 1, 2, 0])]))
    made.update()
    return made


def trainer():
    net = mxmp.convert(seeded(nn.Dense(WIDE, in_units=WIDE)), MASTERS)
    made = mxmp.Trainer(net.collect_params(), "adam")
    with autograd.record():
        loss = net(array(0, 4, WIDE)).sum()
    made.backward(loss)
    made.step(4)
    return made


def plan():
    x = mx.sym.var("data")
    for _ in range(100):
        x = mx.sym.FullyConnected(x, num_hidden=3)
    return mxmp.explain(x).graphs[0].plan


def cast(folder):
    """Writes its input first, outside the limit; returns the writer."""
    module().save_checkpoint(str(folder / "net"), 0)

    def write():
        files = [str(folder / name) for name in ("net-symbol.json", "net-0000.params", "low")]
        if main(["cast", *files, "--force"]):
            raise OSError("exit status 2")

    return write


def times(folder):
    return lambda: machine.write(str(folder / "times.json"), {}, {f"operator {n}": n / 7 for n in range(1000)})


def writer(make, method, name, *arguments):
    """From a folder to a call of ``make().method(folder/name, *arguments)``."""

    def of(folder):
        made = make()
        return lambda: getattr(made, method)(str(folder / name), *arguments)

    return of


WRITERS = {
    "cast": cast,
    "Module.save_checkpoint": writer(module, "save_checkpoint", "a", 1, True),
    "Module.save_params": writer(module, "save_params", "a.params"),
    "Module.save_optimizer_states": writer(module, "save_optimizer_states", "a.states"),
    "BucketingModule.save_checkpoint": writer(wide_bucketing, "save_checkpoint", "a", 1),
    "BucketingModule.save_params": writer(wide_bucketing, "save_params", "a.params"),
    "Trainer.save_states": writer(trainer, "save_states", "a.states"),
    "Plan.save": writer(plan, "save", "a.plan"),
    "tune's times": times,
}


def contents(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def sizes(folder, write):
    """Limits within the largest file that ``write`` makes: its last byte, its last buffers, the middle, the start."""
    write()
    largest = max(map(len, contents(folder).values()))
    return [largest - 1, largest - 100, largest - 5000, largest // 2, 4096]


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_an_error_and_good_files_stay(name, tmp_path):
    write = WRITERS[name](tmp_path)
    limits = sizes(tmp_path, write)
    good = contents(tmp_path)
    for limit in limits:
        with full_after(limit), pytest.raises((OSError, mx.MXNetError)):
            write()
        assert contents(tmp_path) == good, f"full at {limit} of {limits[0] + 1} bytes"


@pytest.mark.parametrize("name", WRITERS)
def test_on_a_full_disk_nothing_half_written_appears(name, tmp_path):
    apart = tmp_path / "apart"
    apart.mkdir()
    limits = sizes(apart, WRITERS[name](apart))
    folder = tmp_path / "empty"
    folder.mkdir()
    write = WRITERS[name](folder)
    before = contents(folder)
    largest = limits[0] + 1
    for limit in limits:
        with full_after(limit), pytest.raises((OSError, mx.MXNetError)):
            write()
        left = {k: v for k, v in contents(folder).items() if k not in before}
        # A checkpoint is several files: those that are there are whole.
        assert all(len(v) < limit for v in left.values()), (limit, largest, {k: len(v) for k, v in left.items()})
        assert not [k for k in left if k.endswith(".part")]
        for k in left:
            (folder / k).unlink()


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(name, tmp_path):
    write = WRITERS[name](tmp_path)
    others = contents(tmp_path)
    write()
    new = {k: len(v) for k, v in contents(tmp_path).items() if k not in others}
    old = dict.fromkeys(new, b"the old one")
    for where in killed_everywhere(write, tmp_path, max(new.values())):
        left = {k: v for k, v in contents(tmp_path).items() if k not in others and not k.endswith(".part")}
        assert left.keys() == old.keys(), where
        for k, v in left.items():
            assert v == old[k] or len(v) == new[k], (where, k)
        for k, v in old.items():
            (tmp_path / k).write_bytes(v)
    assert {k: len(v) for k, v in left.items()} == new


def test_cast_on_a_full_disk_says_so_in_one_line(tmp_path, capsys):
    write = cast(tmp_path)
    write()
    good = contents(tmp_path)
    capsys.readouterr()
    with full_after(len(good["low-0000.params"]) - 1), pytest.raises(OSError, match="status 2"):
        write()
    said = capsys.readouterr()
    assert "Wrote" not in said.out
    assert "low" in said.err
    assert "\n" not in said.err.strip()


@pytest.mark.parametrize("kind", ["export", "save_parameters"])
def test_a_file_of_a_converted_net_s_own_writers_can_be_told_from_a_whole_one(kind, tmp_path):
    """MXNet writes these itself, into their place: what it leaves must at least not load as if it were whole."""
    net = mxmp.convert(seeded(nn.Dense(WIDE, in_units=WIDE)))
    net(array(0, 4, WIDE))
    path = tmp_path / ("net-0000.params" if kind == "export" else "net.params")

    def write():
        net.export(str(tmp_path / "net")) if kind == "export" else net.save_parameters(str(path))

    write()
    size = path.stat().st_size
    for limit in (size - 1, size // 2):
        try:
            with full_after(limit):
                write()
        except (OSError, mx.MXNetError):
            continue
        other = gluon.nn.Dense(WIDE, in_units=WIDE)
        with pytest.raises(mx.MXNetError):
            other.load_parameters(str(path))


def test_a_link_stays_a_link_and_what_it_points_to_is_replaced(tmp_path):
    (tmp_path / "real.params").write_bytes(b"old")
    (tmp_path / "a.params").symlink_to(tmp_path / "real.params")
    module().save_params(str(tmp_path / "a.params"))
    assert (tmp_path / "a.params").is_symlink()
    assert len((tmp_path / "real.params").read_bytes()) > 1000


@pytest.mark.parametrize("method", ["save_params", "save_checkpoint", "save_optimizer_states"])
def test_an_error_of_a_writer_names_the_file_that_was_asked_for(tmp_path, method):
    arguments = (1,) if method == "save_checkpoint" else ()
    with pytest.raises(OSError, match=str(tmp_path / "none" / "a")) as caught:
        getattr(module(), method)(str(tmp_path / "none" / "a"), *arguments)
    assert ".part" not in str(caught.value)
    made, good = module(), tmp_path / "a"
    with full_after(1000), pytest.raises(OSError, match=str(good)) as caught:
        getattr(made, method)(str(good), *arguments)
    assert ".part" not in str(caught.value)
