"""What each kind of run puts in place of mxmp's public names, in a process of its own."""

from __future__ import annotations

import random
import re
import sys
from inspect import isfunction, signature
from itertools import count
from typing import Any, Callable

import mxnet as mx
import numpy as np

from ...host.files import replacing_all
from ...kernels.table import WORKAROUNDS
from ...pipeline import emitted
from ...precision.casts import LowGraph
from ...precision.graph import Graph
from ...precision.rules import draws
from ...step.adaptive import AdaptiveLossScaler
from ...step.scaler import DynamicLossScaler, NoLossScaler, StaticLossScaler
from ...tuning import tune
from ..networks.frontends import stand_ins
from ..networks.stand_ins import Inert, PlainScaler
from .recording import Recorder

_SCALERS = (AdaptiveLossScaler, DynamicLossScaler, NoLossScaler, StaticLossScaler)
_DROPOUT = [mx.nd.Dropout, mx.sym.Dropout, mx.nd.RNN, mx.sym.RNN]
_DROPOUT += [
    operator
    for place in (mx.npx, mx.nd.numpy_extension, mx.sym.numpy_extension)
    for operator in (place.dropout, place.rnn)
]
_FAULTS = {row.name for row in WORKAROUNDS if "float32" in row.dtypes and row.effect == "wrong"}
# Functions of arrays that draw numbers, by module and name.
_DRAWING = re.compile(r"mxnet\.(ndarray|numpy)\.random\.|ndarray\.(random_|sample_|uniform|normal)")


def enter(
    mode: str, recorder: Recorder, before_writing: Callable[[Any], None], *, imperative: bool, dropout: bool
) -> None:
    """Let every public name of mxmp mean what it means in a run of ``mode``, whoever has imported it already; and
    MXNet's Dropout do nothing, if ``dropout`` is False."""
    new = stand_ins(mode, recorder, imperative=imperative)
    if mode == "plain":
        diagnose = sys.modules[__name__.rpartition(".verifying")[0]]
        new.update(dict.fromkeys(filter(isfunction, vars(diagnose).values()), Inert()))
        new.update(dict.fromkeys(_SCALERS, PlainScaler))
    original = replacing_all

    def replacing(*paths: Any) -> Any:
        for path in paths:
            before_writing(path)
        return original(*paths)

    new[replacing_all] = replacing
    build = emitted

    def noting(graph: Graph, *args: Any, **kwargs: Any) -> LowGraph:
        recorder.note_draws(node.op for node in graph.nodes() if draws(node.op, node.attrs))
        low = build(graph, *args, **kwargs)
        recorder.note_faults(name for name in low.workarounds if name in _FAULTS)
        return low

    new[emitted] = noting
    if not dropout:
        new.update({old: _without(old) for old in _DROPOUT})
    if mode != "low":
        new[tune] = _untuned
        # What the script casts itself is part of the port.
        new.update({old: _not_low(old, recorder) for old in _takes_dtype()})
        for kind in (mx.nd.NDArray, mx.np.ndarray):
            kind.astype = _not_low(kind.astype, recorder)
    _replace({id(old): (old, instead) for old, instead in new.items()})


def _replace(by_id: dict[int, tuple[Any, Any]]) -> None:
    for key, module in list(sys.modules.items()):
        names: Any = getattr(module, "__dict__", None)
        own = key.startswith("mxmp.") and key.endswith(".plain")  # the stand-ins call what they stand for
        for name, value in list(names.items()) if isinstance(names, dict) and not own else ():
            if id(value) in by_id:
                names[name] = by_id[id(value)][1]
    for old, instead in by_id.values():
        classes: list[type] = old.__subclasses__() if isinstance(old, type) and isinstance(instead, type) else []
        for derived in classes:
            if not derived.__module__.startswith("mxmp."):
                derived.__bases__ = tuple(instead if base is old else base for base in derived.__bases__)


def _without(operator: Callable) -> Callable:
    """Return a dropout operator, or one with dropout inside, whose share of dropped elements is 0."""
    place = list(signature(operator).parameters).index("p")

    def still(*args: Any, **kwargs: Any) -> Any:
        if place < len(args):
            return operator(*args[:place], 0, *args[place + 1 :], **kwargs)
        return operator(*args, **{**kwargs, "p": 0})

    return still


def _takes_dtype() -> set[Callable]:
    """Return MXNet's functions of arrays with a parameter ``dtype``, such as ``zeros``, ``one_hot`` and ``uniform``."""
    places = (mx.nd, mx.nd.random, mx.np, mx.np.random, mx.npx)
    named = {each for place in places for name, each in vars(place).items() if isfunction(each) and name[0] != "_"}
    # Some of NumPy's own, which stand in mx.np too, have no signature.
    return {each for each in named if not hasattr(each, "__wrapped__") and "dtype" in signature(each).parameters}


def _not_low(cast: Callable, recorder: Recorder) -> Callable:
    """Return a function with a parameter ``dtype`` that gives FP32 where float16 or bfloat16 is asked for."""
    place = list(signature(cast).parameters).index("dtype")
    draws_numbers = _DRAWING.match(f"{cast.__module__}.{cast.__name__}")

    def full(*args: Any, **kwargs: Any) -> Any:
        if not _is_low(args[place] if place < len(args) else kwargs.get("dtype")):
            return cast(*args, **kwargs)
        recorder.record.casts = True
        if draws_numbers:  # MXNet draws others in FP32
            return cast(*args, **kwargs).astype("float32")
        if place < len(args):
            return cast(*args[:place], "float32", *args[place + 1 :], **kwargs)
        return cast(*args, **{**kwargs, "dtype": "float32"})

    return full


def _is_low(dtype: Any) -> bool:
    return "float16" in (getattr(dtype, "__name__", None) or str(dtype))  # MXNet's bfloat16 is [("bfloat16", "<u2")]


def _untuned(*args: Any, policy: Any = "bfloat16", **kwargs: Any) -> Any:
    return policy


def seed_all(number: int, seed_mxnet: Callable[[int], None], other_draws: int) -> None:
    """Seed all generators of random numbers, those too that are made later without a seed; MXNet's with another number
    where its draws, such as dropout masks, are to be others."""
    random.seed(number)
    np.random.seed(number)
    seed_mxnet(number + other_draws)
    made, default = count(number + 1), np.random.default_rng
    np.random.default_rng = lambda seed=None: default(next(made) if seed is None else seed)
