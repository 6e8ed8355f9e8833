"""What to say of the inputs of a call, and of shapes, that a graph or MXNet refuses."""

from __future__ import annotations

import re
from typing import Any, Iterable, NamedTuple

import mxnet as mx
import numpy as np

from ..host.callbacks import last_line

_UNEQUAL = re.compile(r"Incompatible attr in node (\S*) at \d+-th input: expected \[([\d,]*)\], got \[([\d,]*)\]")


class Unequal(NamedTuple):
    """An operator of two Symbols whose shapes differ, and would broadcast as arrays."""

    operator: str
    first: tuple[int, ...]
    second: tuple[int, ...]


def unequal(said: str) -> Unequal | None:
    """Return the operator that MXNet refuses in ``said``, if arrays of its shapes would broadcast."""
    found = _UNEQUAL.search(said)
    if found is None:
        return None
    first, second = (tuple(int(size) for size in text.split(",") if size) for text in found.groups()[1:])
    fits = all(a == b or 1 in (a, b) for a, b in zip(reversed(first), reversed(second)))
    return Unequal(found[1], first, second) if fits else None


def _broadcasting(said: str) -> str:
    """Return what to write where MXNet refuses an operator of Symbols that arrays broadcast; empty elsewhere."""
    found = unequal(said)
    if found is None:
        return ""
    return (
        f"an operator such as x - y broadcasts arrays, but not Symbols, which a graph is made of: for "
        f"{found.operator!r}, of {found.first} and {found.second}, write F.broadcast_add(x, y), broadcast_sub, "
        "broadcast_mul, broadcast_div, broadcast_power or the like"
    )


def _without_gradient(said: str) -> str:
    """Return what to write where MXNet can make no graph, as it makes the gradients with it; empty elsewhere."""
    if operator := re.search(r"Operator (\S+) is non-differentiable", said):
        return (
            f"the operator {operator[1]} has no gradient, and MXNet makes a graph with its gradients, for inference "
            "too: write F.BlockGrad(...) around each of its outputs, and use them all"
        )
    if "There are no inputs in computation graph that require gradients" in said:
        return (
            "no output depends on an input or a Parameter, and MXNet makes a graph with its gradients, for inference "
            "too: make one of an input, such as F.ones_like(x) for F.ones(shape), or call the code outside the net"
        )
    return ""


def explained(error: RuntimeError, inputs: Iterable[Any]) -> mx.MXNetError | None:
    """Return MXNet's error for ``inputs``, arrays or DataDescs, with what to do about it; None if it is another one."""
    said = last_line(error)
    if hint := _broadcasting(said) or _without_gradient(said):
        return mx.MXNetError(f"{hint}. MXNet says: {said}")
    odd = sorted({np.dtype(each.dtype).name for each in inputs} - {"float32"})
    mixed = re.search(r"expected (\w+), got (\w+)", said)
    if not (("requires uniform type" in said and odd) or (mixed and {*mixed.groups()} & {*odd})):
        return None
    return mx.MXNetError(
        f"an input is {' or '.join(odd)}, and an operator multiplies it by weights of another dtype: call "
        f"x.astype('float32') first. MXNet says: {said}"
    )


def of_deferred_shapes(error: ValueError) -> ValueError:
    """Return MXNet's error for Parameters whose shapes it cannot infer, with what to do about it."""
    return ValueError(
        f"{error}. A graph does not call infer_shape of blocks inside: call the net once before mxmp.convert, or make "
        "its layers with in_units or in_channels"
    )


def no_inputs_of_graphs(name: str, error: ValueError) -> ValueError:
    """Return the error of a call of a block with something that is no input of a graph, which ``error`` names."""
    return ValueError(
        f"{name!r}: mxmp runs it as a graph, whose inputs are arrays, None, bools, numbers, strings, or nested lists "
        f"of them ({error}). Pass such, or leave the block as Python: mxmp.convert(net, exclude=lambda name, block: "
        f"name == {name!r}). To predict alone, mxmp.restore(net) after training runs the whole net in FP32, as Python "
        "if it is not hybridized"
    )
