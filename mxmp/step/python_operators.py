"""True gradients for operators that Python code differentiates: ``mx.operator.CustomOp`` and ``autograd.Function``.

Such code may write a gradient of its own, as a loss does, and nothing says whether it looks at the head gradient. So in
a scaled backward it gets the head gradient without the loss scale, and what it writes is multiplied by the scale.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from . import _mxnet


@contextmanager
def true_gradients(scale: float) -> Iterator[None]:
    """Give true gradients to Python operators in the ``with`` block, a backward of a loss multiplied by ``scale``.
    Waits for all devices, before and after the block, if there is any such operator in the process."""
    living = _mxnet.python_operators() if scale != 1.0 else []
    if not living:
        yield
        return
    # MXNet calls them in threads of its own. Those of an earlier backward, or a later one, may have another scale.
    mx.nd.waitall()
    own = [vars(operator).get("backward") for operator in living]
    for operator in living:
        wrapped = _returning if isinstance(operator, autograd.Function) else _writing
        operator.backward = wrapped(operator.backward, scale)
    try:
        yield
        mx.nd.waitall()
    finally:
        for operator, before in zip(living, own):
            del operator.backward
            if before is not None:
                operator.backward = before


def _returning(backward: Callable, scale: float) -> Callable:
    def scaled(*heads: NDArray) -> Any:
        if _is_narrow(heads):
            return backward(*heads)
        found = backward(*(head / scale for head in heads))
        found = [found] if isinstance(found, NDArray) else found
        return [each * scale if isinstance(each, NDArray) else each for each in found]

    return scaled


def _writing(backward: Callable, scale: float) -> Callable:
    def scaled(**given: Any) -> None:
        heads, gradients = given["out_grad"], given["in_grad"]
        # A CustomOp that says it needs no head gradients gets empty arrays: its graph multiplies (precision/heads.py).
        has_heads = [head.dtype is not None for head in heads]
        if (heads and not any(has_heads)) or _is_narrow(heads):
            backward(**given)
            return
        requests = given.get("req") or ["write"] * len(gradients)
        written = [_zeros_like(each) if req == "add" else each for each, req in zip(gradients, requests)]
        if "req" in given:
            given["req"] = ["write" if req == "add" else req for req in requests]
        true = [head / scale if has else head for head, has in zip(heads, has_heads)]
        backward(**{**given, "out_grad": true, "in_grad": written})
        for gradient, each, req in zip(gradients, written, requests):
            if req == "add":
                gradient += each * scale
            elif req != "null":
                each *= scale

    return scaled


def _zeros_like(array: NDArray) -> NDArray:
    return (mx.np if isinstance(array, mx.np.ndarray) else mx.nd).zeros_like(array)


def _is_narrow(heads: Any) -> bool:
    """Return whether a head gradient has 16 bits, and might be 0 without the loss scale: it keeps it."""
    return any(head.dtype is not None and np.dtype(head.dtype).itemsize < 4 for head in heads)
