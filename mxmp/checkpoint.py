"""One call that saves a run, and one that continues it: parameters, states, epoch and random numbers of one step."""

from __future__ import annotations

import errno
import json
import os
import random
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon

from .files import read_json, replacing_all
from .gluon import Trainer
from .messages import instead
from .symbolic import BucketingModule, Module
from .symbolic.checkpoint import incomplete_if_it_fails
from .symbolic.module import require
from .wrong_files import near_name

_FORMAT = "mxmp-checkpoint-1"
_ENDINGS = ".params", ".states", ".json"
_ORDER = "the order is path, net, trainer"


def save_checkpoint(
    path: str | os.PathLike,
    net: gluon.Block | Module | BucketingModule,
    trainer: Any = None,
    *,
    epoch: int | None = None,
) -> None:
    """Save all that a run needs to continue bit for bit, in files that appear together.

    ``PATH.params`` has the FP32 parameters, in the format of ``net.save_parameters`` or ``module.save_params``, which
    MXNet reads without mxmp; ``PATH.states`` has optimizer states, master weights, loss scale and counters;
    ``PATH.json`` has the epoch and the states of the random numbers of NumPy and Python. MXNet's random numbers have no
    state that can be read, so this call seeds them anew (``mx.random.seed``, on all devices) by a number that it draws
    from NumPy, and saves the number: both runs go on with the same ones. Not saved are the position of a data iterator,
    the order of one that shuffles in place (MXNet's ``NDArrayIter`` and ``BucketSentenceIter``), and random numbers of
    other processes, such as the workers of a ``DataLoader``. Nor are averages of weights (EMA) that you keep, which
    ``mx.nd.save`` writes. Of several nets, save and load each
    in the same order. Of several workers, let each have a path of its own, or all will draw the same random numbers.
    Waits for the device.

    Parameters
    ----------
    path : str
        The beginning of the files' names, such as ``"run/epoch-3"``.
    net : gluon.Block, mxmp.Module or mxmp.BucketingModule
        The network. A module must have its optimizer.
    trainer : mxmp.Trainer
        The trainer of a Block, after ``step``; None for a module.
    epoch : int, optional
        A number that ``load_checkpoint`` returns.

    Raises
    ------
    TypeError
        ``net`` or ``trainer`` is none of these; a Block without a trainer, or a module with one.
    RuntimeError
        A module has no parameters or optimizer yet, or ``trainer`` is between a backward and its step.
    OSError
        A file cannot be written. All old files are then as they were.

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(16, activation="relu"), nn.Dense(2))
    >>> net.initialize()
    >>> net = mxmp.convert(net, "float16")
    >>> trainer = mxmp.Trainer(net.collect_params(), "adam")
    >>> out = net(mx.nd.random.uniform(shape=(8, 4)))
    >>> mxmp.save_checkpoint("run", net, trainer, epoch=3)
    """
    _check_kinds(path, net, trainer)
    if not isinstance(net, gluon.Block):
        require(net, optimizer=True)
    with replacing_all(*(os.fspath(path) + ending for ending in _ENDINGS)) as (params, saved, rest):
        if isinstance(net, gluon.Block):
            net.save_parameters(params)
            with incomplete_if_it_fails():
                mx.nd.load(params)
            trainer.save_states(saved)
        else:
            net.save_params(params)
            net.save_optimizer_states(saved)
        seed = int(np.random.randint(2**31))
        state: Any = np.random.get_state(legacy=True)
        kind, keys, *position = state
        content = {
            "format": _FORMAT,
            "epoch": epoch if epoch is None else int(epoch),
            "mxnet_seed": seed,
            "numpy": [kind, list(map(int, keys)), *position],
            "python": random.getstate(),
        }
        with open(rest, "w", encoding="utf-8") as file:
            json.dump(content, file)
    mx.random.seed(seed)


def load_checkpoint(path: str | os.PathLike, net: Any, trainer: Any = None) -> int | None:
    """Continue from the files of ``save_checkpoint``; return the epoch that was saved, or None.

    Loads parameters, states, and the random numbers of MXNet (all devices), NumPy and Python.

    Parameters
    ----------
    path : str
        As for ``save_checkpoint``.
    net : gluon.Block, mxmp.Module or mxmp.BucketingModule
        The network, built by the same code. A Block must be initialized, and may be converted by another policy. A
        module must be bound, and have parameters and its optimizer.
    trainer : mxmp.Trainer
        The trainer of a Block; None for a module.

    Raises
    ------
    TypeError
        As for ``save_checkpoint``.
    ValueError
        A file is damaged, or the states are of other parameters or another optimizer. Nothing has changed.
    RuntimeError
        A module is not bound, or has no optimizer; the checkpoint of a module lacks a parameter.
    OSError
        A file cannot be read. Nothing has changed.

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(16, activation="relu"), nn.Dense(2))
    >>> net.initialize()
    >>> net = mxmp.convert(net, "float16")
    >>> trainer = mxmp.Trainer(net.collect_params(), "adam")
    >>> out = net(mx.nd.random.uniform(shape=(8, 4)))
    >>> mxmp.save_checkpoint("run", net, trainer, epoch=3)
    >>> mxmp.load_checkpoint("run", net, trainer)
    3
    """
    _check_kinds(path, net, trainer)
    params, saved, rest = (os.fspath(path) + ending for ending in _ENDINGS)
    content = _read(rest)
    if isinstance(net, gluon.Block):
        trainer.check_states(saved)
        net.load_parameters(params)
        trainer.load_states(saved)
    else:
        net.check_optimizer_states(saved)
        net.load_params(params)
        net.load_optimizer_states(saved)
    np.random.set_state(content["numpy"])
    random.setstate(content["python"])
    mx.random.seed(content["mxnet_seed"])
    return content["epoch"]


def _check_kinds(path: Any, net: Any, trainer: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected the beginning of the files' names, got {type(path).__name__}: {_ORDER}")
    if isinstance(net, gluon.Block):
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"a checkpoint of a Block needs its mxmp.Trainer, got {type(trainer).__name__}; parameters alone are "
                "net.save_parameters(file) and net.load_parameters(file)"
            )
    elif not isinstance(net, (Module, BucketingModule)):
        fix = f": {_ORDER}" if isinstance(net, Trainer) else instead(net)
        raise TypeError(
            f"net: expected a gluon Block, an mxmp.Module or BucketingModule, got {type(net).__name__}{fix}"
        )
    elif trainer is not None:
        raise TypeError("a module has its optimizer itself: leave out the trainer")


def _read(path: str) -> dict:
    """Return the content of ``PATH.json``; raise ``ValueError`` for another or a damaged file."""
    if not os.path.exists(path):
        given = path[: -len(_ENDINGS[-1])]
        start, ending = os.path.splitext(given)
        if ending in _ENDINGS and os.path.exists(start + _ENDINGS[-1]):
            fix = f"; write {start!r}, without the ending"
        elif os.path.isfile(given):
            fix = "; parameters alone are net.load_parameters(file) or module.load_params(file)"
        else:
            fix = near_name(given + _ENDINGS[1], _ENDINGS[1]).replace(f"{_ENDINGS[1]}'", "'")
        what = f"{os.strerror(errno.ENOENT)}; expected that of mxmp.save_checkpoint{fix}"
        raise FileNotFoundError(errno.ENOENT, what, path)
    try:
        content = read_json(path)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        kind, keys, *position = content["numpy"]
        version, inner, gauss = content["python"]
        numbers = {
            "numpy": (kind, np.array(keys, np.uint32), *position),
            "python": (version, tuple(inner), gauss),
        }
        np.random.RandomState().set_state(numbers["numpy"])
        random.Random().setstate(numbers["python"])
        return {**numbers, "epoch": content["epoch"], "mxnet_seed": int(content["mxnet_seed"])}
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path!r} is not of mxmp.save_checkpoint, or it is damaged: {error}") from error
