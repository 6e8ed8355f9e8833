"""Counts what a call asks of MXNet's library, and of Python: figures that do not vary, unlike times."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB


def ffi_calls(call: Callable[[], Any]) -> int:
    """Return how often ``call`` calls functions of MXNet's library that were called before, too."""
    count = 0

    def counting(function: Any) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            nonlocal count
            count += 1
            return function(*args)

        return counted

    before = {name: each for name, each in vars(_LIB).items() if name.startswith(("MX", "NN"))}
    for name, function in before.items():
        setattr(_LIB, name, counting(function))
    try:
        call()
    finally:
        for name, function in before.items():
            setattr(_LIB, name, function)
    return count


def python_calls(call: Callable[[], Any]) -> int:
    profile = cProfile.Profile()
    profile.runcall(call)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def calls_of_a_step(
    net: Any, inputs: Sequence[mx.nd.NDArray], trainer: Any, backward: Callable[[mx.nd.NDArray], Any]
) -> tuple[int, int]:
    """Return calls of MXNet's library, and of Python functions, in a step in the middle of training."""

    def trained(step: Callable[[], int]) -> int:
        with autograd.record():
            loss = net(*inputs).sum()
        backward(loss)
        mx.nd.waitall()
        return step()

    for _ in range(3):
        trained(lambda: trainer.step(1))
    return trained(lambda: ffi_calls(lambda: trainer.step(1))), trained(lambda: python_calls(lambda: trainer.step(1)))
