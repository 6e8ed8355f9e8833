"""What each kind of run puts in place of mxmp's public names, in a process of its own."""

from __future__ import annotations

import random
import sys
from inspect import isfunction
from itertools import count
from typing import Any, Callable

import numpy as np

from ...files import replacing_all
from ...step.adaptive import AdaptiveLossScaler
from ...step.scaler import DynamicLossScaler, NoLossScaler, StaticLossScaler
from ...tuning import tune
from ..networks.frontends import stand_ins
from ..networks.stand_ins import Inert, PlainScaler, StepRecorder

_SCALERS = (AdaptiveLossScaler, DynamicLossScaler, NoLossScaler, StaticLossScaler)


def enter(mode: str, recorder: StepRecorder, before_writing: Callable[[Any], None], *, imperative: bool) -> None:
    """Let every public name of mxmp mean what it means in a run of ``mode``, whoever has imported it already."""
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
    if mode != "low":
        new[tune] = _untuned
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


def _untuned(*args: Any, policy: Any = "bfloat16", **kwargs: Any) -> Any:
    return policy


def seed_all(number: int, seed_mxnet: Callable[[int], None], draws: int) -> None:
    """Seed all generators of random numbers, those too that are made later without a seed."""
    random.seed(number)
    np.random.seed(number)
    seed_mxnet(number + draws)
    made, default = count(number + 1), np.random.default_rng
    np.random.default_rng = lambda seed=None: default(next(made) if seed is None else seed)
