"""What this room reaches behind MXNet's public interface. A test holds each against 1.9.1."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Mapping, Sequence

import mxnet as mx
from mxnet.base import _LIB, check_call, py_str

__all__ = ["custom_op_reads_gradient", "has_operator", "hidden_outputs", "is_numpy"]


def is_numpy(symbol: mx.sym.Symbol) -> bool:
    """Whether it is a Symbol of ``mx.sym.np``."""
    return isinstance(symbol, mx.sym.np._Symbol)


def has_operator(name: str) -> bool:
    """Whether MXNet registers an operator, internal ones (``_plus_scalar``) included."""
    return hasattr(mx.sym, name) or hasattr(mx.sym._internal, name)


def custom_op_reads_gradient(attrs: Mapping[str, str], num_inputs: int) -> bool:
    """Whether the backward of a Custom operator reads the gradient from above.

    Neither the graph nor any public call tells, and a declaration by the user could be forgotten. MXNet
    keeps the ``CustomOpProp`` of every Custom node that it makes, so one more is made, with the same
    attributes, and asked.
    """
    registry = mx.operator._registry.ref_holder
    before = set(registry)
    node = mx.sym.Custom(*(mx.sym.var(f"in{i}") for i in range(num_inputs)), **attrs)
    props = [registry[k] for k in set(registry) - before if isinstance(registry[k], mx.operator.CustomOpProp)]
    if node is None or not props:
        return True
    prop = props[-1]
    outputs = [("out", i) for i in range(len(prop.list_outputs()))]
    inputs = [("in", i) for i in range(len(prop.list_arguments()))]
    return any(kind == "out" for kind, _ in prop.declare_backward_dependency(outputs, inputs, []))


def hidden_outputs(recorded: mx.sym.Symbol, nodes: Sequence[str]) -> dict[str, dict[str, bool]]:
    """For each of these ``_CachedOp`` nodes: the names of its outputs, and whether its backward reads their gradients.

    The names are ``<node>_<name inside the block>``. Nothing in Python leads from a recorded node to what is in it,
    but MXNet's gradient pass knows its backward. The pass lacks operators where an output has no gradient or an array
    has several: there the node is cut out of a copy of the graph first. A node that is given no array but once, and
    none else, is left out.
    """
    found: dict[str, dict[str, bool]] = {}
    for node in nodes:
        try:
            found[node] = _read_gradients(recorded, node)
        except mx.MXNetError:
            found[node] = _read_gradients(recorded.__copy__(), node, cut=True)
    return {node: outputs for node, outputs in found.items() if outputs}


def _read_gradients(recorded: mx.sym.Symbol, node: str, cut: bool = False) -> dict[str, bool]:
    inner = recorded.get_internals()
    outputs = {name: i for i, name in enumerate(inner.list_outputs()) if name.startswith(f"{node}_")}
    block = mx.sym.Group([inner[i] for i in outputs.values()])
    if cut:
        block[0]._set_attr(__subgraph_name__=node)
        _cut_off_inputs(block)
    given = block.get_children()
    times = Counter(given.list_outputs())
    once = [given[i] for i, name in enumerate(given.list_outputs()) if times[name] == 1]
    if not once:
        return {}
    above = {name: f"{name}_gradient" for name in outputs}
    backward = _gradients(block, mx.sym.Group(once), mx.sym.Group([mx.sym.var(name) for name in above.values()]))
    read = backward.get_children()
    names = set() if read is None else set(read.list_outputs())  # None: all are running statistics
    return {name: variable in names for name, variable in above.items()} if names else {}


def _cut_off_inputs(block: mx.sym.Symbol) -> None:
    """Replace what the node behind ``block`` reads by variables; the node has an attribute ``__subgraph_name__``."""
    inputs, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_int()
    check_call(_LIB.MXSymbolCutSubgraph(block.handle, ctypes.byref(inputs), ctypes.byref(count)))
    for i in range(count.value):
        check_call(_LIB.NNSymbolFree(ctypes.c_void_p(inputs[i])))


def _gradients(outputs: mx.sym.Symbol, inputs: mx.sym.Symbol, above: mx.sym.Symbol) -> mx.sym.Symbol:
    """The gradients of ``inputs``, given the ones ``above`` of ``outputs``, as autograd would compute them."""
    graph, made, symbol = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check_nnvm(_LIB.NNGraphCreate(outputs.handle, ctypes.byref(graph)))
    try:
        for key, entries in ((b"grad_ys", outputs), (b"grad_xs", inputs), (b"grad_ys_out_grad", above)):
            _check_nnvm(_LIB.NNGraphSetNodeEntryListAttr_(graph, key, entries.handle))
        passes = (ctypes.c_char_p * 1)(b"MXGradient")
        _check_nnvm(_LIB.NNGraphApplyPasses(graph, 1, passes, ctypes.byref(made)))
        _check_nnvm(_LIB.NNGraphGetSymbol(made, ctypes.byref(symbol)))
    finally:
        for handle in (graph, made):
            _LIB.NNGraphFree(handle)
    return mx.sym.Symbol(symbol)


def _check_nnvm(status: int) -> None:
    """As ``check_call``, for what keeps its errors in another place."""
    if status != 0:
        _LIB.NNGetLastError.restype = ctypes.c_char_p
        raise mx.MXNetError(py_str(_LIB.NNGetLastError()))
