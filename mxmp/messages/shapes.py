"""Shapes of inputs that a user wrote: read, asked for and checked."""

from __future__ import annotations

from difflib import get_close_matches
from math import prod
from numbers import Integral
from typing import Any, Sequence

import mxnet as mx
import numpy as np

from ..policy import Policy, is_policy_text


def as_shape(value: Any, name: str = "") -> tuple[int, ...]:
    """Return a shape that a user wrote for the input ``name`` as a tuple of int; raise ``ValueError`` if it is none."""
    start = f"{name}=" if name else ""
    if isinstance(value, (tuple, list)):
        sizes = tuple(int(size) for size in value if isinstance(size, Integral) and not isinstance(size, bool))
        if sizes and len(sizes) == len(value) and min(sizes) > 0:
            return sizes
        hint = "every size, that of the batch too, must be a positive integer"
    elif isinstance(value, np.ndarray):
        raise ValueError(f"{start}a NumPy array: give mx.nd.array(x), or its shape {value.shape}")
    else:
        hint = "a shape is a tuple, such as (32, 3, 224, 224)"
        if isinstance(value, Policy) or (isinstance(value, str) and is_policy_text(value)):
            hint = f"a policy is given by name, policy={str(value)!r}"
    raise ValueError(f"{start}{value!r} is neither an MXNet array nor a shape: {hint}")


def wanted_shapes(names: Sequence[str]) -> str:
    """Return the end of a message about inputs whose shapes are not known."""
    return (
        f"{', '.join(names[:5])}: give those of all inputs, such as {names[0]}=(32, 3, 224, 224), or "
        f"--shape {names[0]}=32,3,224,224 on the command line"
    )


def check_shapes(shapes: dict[str, tuple], inputs: list[str], keywords: Sequence[str] = ()) -> None:
    """Raise ``ValueError`` if a name or shape that a user wrote is wrong; ``keywords`` is what else may be meant."""
    largest = 2**63 - 1 if mx.runtime.Features().is_enabled("INT64_TENSOR_SIZE") else 2**31 - 1
    for name, shape in shapes.items():
        if name not in inputs:
            close = get_close_matches(name, [*inputs, *keywords], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(inputs[:5])}, ..."
            raise ValueError(f"the Symbol has no input {name!r}; {hint}")
        as_shape(shape, name)
        if any(size > largest for size in shape) or prod(shape) > 2**63 - 1:
            raise ValueError(
                f"{name}={shape} is too large for MXNet: a size is at most {largest:,}, all at most 2**63 - 1"
            )
