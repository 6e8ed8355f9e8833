"""The gradients of a batch that runs through graphs and Python code, one segment after the other.

A graph reads copies of its inputs, and Python code copies of its outputs, so that each is recorded apart. Backward, a
graph writes into arrays that exist, as MXNet's autograd.grad ends the process at a Deconvolution; Python code goes
through autograd.grad, which writes no gradient of an array that is not the replay's, such as another net's parameter.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from .arrays import full, is_float


class _Call(NamedTuple):
    # What Python code gave to the graph, and what the graph reads.
    given: list[NDArray]
    read: list[NDArray]
    # What the graph returned, and what Python code gets.
    made: list[NDArray]
    returned: list[NDArray]
    # The trained parameters that it reads, each by a key.
    trained: Mapping[Any, NDArray]


class Segments:
    """Records the calls of graphs in one replay, and differentiates through them."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def entered(self, inputs: Mapping[str, NDArray], trained: Mapping[Any, NDArray]) -> dict[str, NDArray]:
        """Return what a graph is to read in place of ``inputs``; ``trained`` have arrays for gradients."""
        returned = self._returned()
        read = {n: _apart(array) if returned.keys() & _leaves(array) else array.detach() for n, array in inputs.items()}
        self._calls.append(_Call([*inputs.values()], [*read.values()], [], [], trained))
        return read

    def left(self, outputs: Sequence[NDArray]) -> list[NDArray]:
        """Return what Python code is to get in place of the ``outputs`` of the graph that was entered last."""
        call = self._calls[-1]
        call.made.extend(outputs)
        call.returned.extend(map(_apart, outputs))
        return call.returned

    def gradients(self, heads: Sequence[NDArray], scale: float) -> dict[Any, np.ndarray]:
        """Return the gradients of the sum of ``heads`` times ``scale``, by the keys of the trained parameters."""
        found: dict[Any, np.ndarray] = {}
        starts = [mx.nd.full(each.shape, scale, ctx=each.ctx, dtype=each.dtype) for each in heads]
        self._through_python(heads, starts)
        for call in reversed(self._calls):
            sent = [(out, apart.grad) for out, apart in zip(call.made, call.returned) if apart.grad is not None]
            back = [(array, fed) for array, fed in zip(call.given, call.read) if fed.grad is not None]
            if sent and (call.trained or back):
                autograd.backward(*map(list, zip(*sent)))
            for key, array in call.trained.items():
                found[key] = found.get(key, 0.0) + full(array.grad)
            self._through_python([array for array, _ in back], [fed.grad for _, fed in back])
        return found

    def _returned(self) -> dict[str, NDArray]:
        """Return what Python code got from graphs, by the names that autograd gave it."""
        return {_name(each): each for call in self._calls for each in call.returned if each.grad is not None}

    def _through_python(self, heads: Sequence[NDArray], starts: Sequence[NDArray]) -> None:
        """Add to the gradients of what graphs returned those of ``heads``, which Python code made of them."""
        returned = self._returned()
        for head, start in zip(heads, starts):
            read = [returned[name] for name in _leaves(head) if name in returned]
            if read:
                found = autograd.grad([head], read, [start], retain_graph=True)
                for array, gradient in zip(read, found):
                    total = array.grad.as_nd_ndarray()  # of mx.np's arrays too
                    with autograd.pause():
                        total += gradient.as_nd_ndarray()


def _apart(array: NDArray) -> NDArray:
    """Return an array of the same memory that autograd takes for a new one, with a gradient of zeros if it is float."""
    copy = array.detach()
    if is_float(copy):
        copy.attach_grad("add")
    return copy


def _leaves(array: NDArray) -> list[str]:
    try:
        return autograd.get_symbol(array).list_inputs()
    except mx.MXNetError:  # it was not recorded
        return []


def _name(array: NDArray) -> str:
    return autograd.get_symbol(array).name
