"""The FP32 graph of a call of a block, and inputs for it, where no graph is to run: to plan, to serve, to explain."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import HybridBlock, Parameter
from mxnet.ndarray import NDArray

from ..messages.shapes import as_shape
from ..policy import is_policy_text
from . import _mxnet
from .graphs import UntraceableError, answered, named_inputs, trace_block, without_last_outputs
from .nesting import split

_INPUTS = (NDArray, list, tuple, type(None))


class TracedCall(NamedTuple):
    """The FP32 graph of one call of a block, traced without running an operator."""

    symbol: mx.sym.Symbol
    # The arrays of the call, by the names of the graph's variables.
    inputs: dict[str, NDArray]
    params: dict[str, Parameter]
    # Takes the flat list of the graph's outputs, does what the call would with them, and returns what it would.
    answered: Callable[[list[NDArray]], Any]


def traced_call(block: HybridBlock, args: tuple, training: bool, *, served: bool = False) -> TracedCall:
    """Return the FP32 graph of ``block(*args)`` in training or inference mode; ``block`` stays as it is.
    Behind the outputs there are results that the code leaves in attributes, unless the graph is to be served.
    Raises ``ValueError`` if the block's Python code fails on Symbols."""
    args, constants = split(args)
    try:
        with autograd.record() if training else autograd.pause():
            clone, nesting, _, _, left, _ = trace_block(block, args, constants, undone=True)
    except UntraceableError as error:
        culprit, reason = error.args
        policies = [each for each in constants.values() if isinstance(each, str) and is_policy_text(each)]
        hint = f"; a policy is given by name, policy={policies[0]!r}" if policies else ""
        raise ValueError(f"{culprit.name!r} cannot be traced, so it has no graph to plan: {reason}{hint}") from error
    traced = _mxnet.traced_graph(clone)
    data, symbol = traced.graph
    if served:
        symbol = without_last_outputs(symbol, left.outputs)
    names = set(symbol.list_inputs())
    params = {param.name: param for param in block.collect_params().values() if param.name in names}
    inputs = {name: array for name, array in named_inputs(data, args).items() if name in names}
    return TracedCall(symbol, inputs, params, lambda outs: answered(outs, nesting, left, traced))


def read_inputs(inputs: Sequence[Any]) -> tuple[tuple, list[NDArray]]:
    """Return ``inputs`` as arguments of a call, with a new array for each shape, and a list of the new arrays.
    These are FP32, on the CPU, not initialized. ``ValueError``: one is no argument of a call, nor a shape."""
    made: list[NDArray] = []
    empty = mx.np.empty if mx.util.is_np_array() else mx.nd.empty  # no operator runs, so no thread starts

    def read(value: Any) -> Any:
        if value is None or isinstance(value, NDArray):
            return value
        # A list of anything else is a shape, right or wrong.
        if isinstance(value, (list, tuple)) and value and all(isinstance(each, _INPUTS) for each in value):
            return [read(each) for each in value]
        made.append(empty(as_shape(value), ctx=mx.cpu()))
        return made[-1]

    if inputs and all(isinstance(each, int) for each in inputs):
        raise ValueError(f"got the numbers {', '.join(map(str, inputs))}: give a shape as one tuple, {tuple(inputs)}")
    beside = any(isinstance(each, _INPUTS[:-1]) for each in inputs)
    return tuple(each if beside and isinstance(each, (bool, int, float, str)) else read(each) for each in inputs), made
