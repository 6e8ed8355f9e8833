"""Gradients of a step on two devices, finite and not, and a step of them without a frontend."""

from __future__ import annotations

import math

import mxnet as mx

from mxmp.step.gradients import Gradient
from mxmp.step.step import ScaledStep

CLEAN = [Gradient("a", mx.nd.ones(3)), Gradient("b", mx.nd.ones((2, 2), ctx=mx.cpu(1)))]
SPOILED = [CLEAN[0], Gradient("b", mx.nd.full((2, 2), math.nan, ctx=mx.cpu(1)))]


def run(step: ScaledStep, gradients: list[Gradient]) -> bool:
    """Whether the step was applied."""
    applied = []
    returned = step.run(gradients, lambda: applied.append(1))
    assert returned == bool(applied)
    return bool(applied)
