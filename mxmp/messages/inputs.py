"""What to say of the inputs of a call, and of shapes, that a graph or MXNet refuses."""

from __future__ import annotations

import re
from typing import Any, Iterable

import mxnet as mx
import numpy as np

from ..host.callbacks import last_line

_UNEQUAL = re.compile(r"Incompatible attr in node (\S*) at \d+-th input: expected \[([\d,]+)\], got \[([\d,]+)\]")


def _broadcasting(said: str) -> str:
    """Return what to write where MXNet refuses an operator between Symbols that arrays broadcast; empty if it is not
    that."""
    found = _UNEQUAL.search(said)
    if found is None:
        return ""
    first, second = ([int(size) for size in text.split(",")] for text in found.groups()[1:])
    if len(first) != len(second) or any(a != b and 1 not in (a, b) for a, b in zip(first, second)):
        return ""
    return (
        f"an operator such as x - y broadcasts arrays, but not Symbols, which a graph is made of: for "
        f"{found[1]!r}, of {tuple(first)} and {tuple(second)}, write F.broadcast_add(x, y), broadcast_sub, "
        "broadcast_mul, broadcast_div, broadcast_power or the like"
    )


def explained(error: RuntimeError, inputs: Iterable[Any]) -> mx.MXNetError | None:
    """Return MXNet's error for ``inputs``, arrays or DataDescs, with what to do about it; None if it is another one."""
    said = last_line(error)
    if hint := _broadcasting(said):
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
    hint = _broadcasting(str(error)) or (
        "a graph does not call infer_shape of blocks inside: call the net once before mxmp.convert, or make its layers "
        "with in_units or in_channels"
    )
    return ValueError(f"{error}. {hint[0].upper()}{hint[1:]}")


def of_no_child(block: str, param: str) -> ValueError:
    """Return the error of a block that calls a layer, of which ``param`` is, without having it as a child."""
    return ValueError(
        f"{param!r} is a Parameter of a layer that {block!r} calls and that is no child of it, as one in a list, dict "
        "or plain object: no Trainer, file and conversion of the net has it. Call self.register_child(layer) in "
        "__init__, or put the layers into a gluon.nn.HybridSequential"
    )


def no_inputs_of_graphs(name: str, error: ValueError) -> ValueError:
    """Return the error of a call of a block with something that is no input of a graph, which ``error`` names."""
    return ValueError(
        f"{name!r}: mxmp runs it as a graph, whose inputs are arrays, None, bools, numbers, strings, or nested lists "
        f"of them ({error}). Pass such, or leave the block as Python: mxmp.convert(net, exclude=lambda name, block: "
        f"name == {name!r}). To predict alone, mxmp.restore(net) after training runs the whole net in FP32, as Python "
        "if it is not hybridized"
    )
