"""What ``tune`` is to plan, as data that another process can read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Collection, Mapping, NamedTuple

import mxnet as mx
from mxnet.gluon import Block, HybridBlock
from mxnet.ndarray import NDArray

from ..gluon.blocks import prefixes_of
from ..gluon.graphs import read_inputs, traced_alone
from ..policy import Policy
from ..precision._mxnet import is_numpy
from ..precision.casts import strip
from ..precision.graph import Graph, as_shape
from .stand_ins import described

__all__ = ["Crash", "Job", "job_of"]


class Crash(NamedTuple):
    """How a process ended that measured a plan.

    Attributes
    ----------
    low : frozenset of str
        The operators that compute low under that plan, by name.
    operators : tuple of str
        The operator that ran, or those around the cast that ran; empty where this is not known.
    how : str
        For example "by SIGSEGV".
    """

    low: frozenset[str]
    operators: tuple[str, ...]
    how: str


@dataclass(frozen=True)
class Job:
    """A network, and what its plan is for. ``pickle`` takes it; but for ``values``, nothing in it is the user's object.

    Attributes
    ----------
    symbol : str
        JSON of the network, in FP32 or converted, as ``described`` writes it.
    numpy : tuple of bool
        Whether it is a Symbol of the NumPy kind, and MXNet's NumPy semantics where ``tune`` was called: of shapes, of
        arrays.
    policy : Policy
    ctx : mxnet.Context
    training : bool
    inputs : mapping of str to tuple of int
        The shapes of the inputs, by name; other variables are parameters and states.
    values : mapping of str to NDArray
        Of inputs that were given as arrays.
    grad_req : mapping of str to str
        The requested gradients of variables, by name.
    parameters : list of str, optional
        The names of a block's parameters; None for a Symbol, which keeps the names of its outputs.
    blocks : tuple of str
        For ``Plan``.
    stand_ins : list of str
        The operators that only the user's process knows, for a note.
    seconds : dict of str to float
        Times that are known, by signature: see ``Table``.
    crashes : tuple of Crash
        What ended earlier processes, and is left out.
    """

    symbol: str
    numpy: tuple[bool, bool, bool]
    policy: Policy
    ctx: mx.Context
    training: bool
    inputs: Mapping[str, tuple[int, ...]]
    values: Mapping[str, NDArray]
    grad_req: Mapping[str, str]
    parameters: Collection[str] | None
    blocks: tuple[str, ...]
    stand_ins: list[str]
    seconds: dict[str, float] = field(default_factory=dict)
    crashes: tuple[Crash, ...] = ()

    def graph(self) -> Graph:
        """Return the graph in FP32, without anything that mxmp inserts; every call returns another one."""
        return strip(Graph.from_json(self.symbol, numpy=self.numpy[0]))

    def after(self, crash: Crash) -> Job:
        """Return what is left to do after a crash."""
        return replace(self, crashes=(*self.crashes, crash))


def job_of(
    target: Block | mx.sym.Symbol,
    inputs: tuple,
    named: Mapping[str, Any],
    policy: Policy,
    ctx: mx.Context,
    training: bool,
    measure: bool,
) -> Job:
    """Return the job for a block or a Symbol, which stays as it is; nothing runs.

    ``inputs``, ``named``, ``measure``: as ``tune`` takes them.

    Raises
    ------
    TypeError
        ``target`` is neither.
    ValueError
        The block cannot be traced, there is no such input, or an operator cannot be measured in another process.
    """
    if isinstance(target, mx.sym.Symbol):
        subject = _of_symbol(target, inputs, named)
    else:
        subject = _of_block(target, inputs, named, training)
    shapes, names = subject.shapes, subject.symbol.list_inputs()
    unknown = sorted(set(shapes) - set(names))
    if unknown:
        raise ValueError(f"there is no input {unknown[0]!r}: it has {', '.join(names[:5])}, ...")
    text, stand_ins, inside_loops = described(subject.symbol, shapes)
    if inside_loops and measure:
        raise ValueError(
            f"{inside_loops[0]} in the body of a loop is known to this process alone, and tune measures in a process "
            "of its own: plan without measuring, by measure=False"
        )
    return Job(
        symbol=text,
        numpy=(is_numpy(subject.symbol), mx.util.is_np_shape(), mx.util.is_np_array()),
        policy=policy,
        ctx=ctx,
        training=training,
        inputs=shapes,
        values=subject.values,
        grad_req=subject.grad_req or {name: "write" for name in names if name not in shapes},
        parameters=subject.parameters,
        blocks=subject.blocks,
        stand_ins=stand_ins,
    )


class _Subject(NamedTuple):
    """The network of ``target`` as plain data. ``grad_req``: by parameter name; empty if no gradient is requested."""

    symbol: mx.sym.Symbol
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, NDArray]
    parameters: list[str] | None
    grad_req: Mapping[str, str]
    blocks: tuple[str, ...]


def _of_symbol(symbol: mx.sym.Symbol, inputs: tuple, named: Mapping[str, Any]) -> _Subject:
    if inputs:
        raise ValueError("name the inputs of a Symbol: tune(symbol, data=(32, 3, 224, 224))")
    values = {name: value for name, value in named.items() if isinstance(value, NDArray)}
    shapes = {name: value.shape if name in values else as_shape(value, name) for name, value in named.items()}
    return _Subject(symbol, shapes, values, None, {}, ())


def _of_block(block: Any, inputs: tuple, named: Mapping[str, Any], training: bool) -> _Subject:
    if not isinstance(block, Block):
        raise TypeError(f"tune takes a gluon HybridBlock or a Symbol, got {type(block).__name__}")
    if named or not inputs:
        raise ValueError("give a block its inputs, or their shapes, in order: named inputs are for Symbols")
    if not isinstance(block, HybridBlock):
        raise ValueError(f"{block.name!r} runs as Python, which has no plan: tune the HybridBlocks in it")
    arrays, empty = read_inputs(inputs)
    symbol, found, params = traced_alone(block, arrays, training)
    return _Subject(
        symbol,
        {name: array.shape for name, array in found.items()},
        {name: array for name, array in found.items() if all(array is not each for each in empty)},
        list(params),
        {name: param.grad_req for name, param in params.items()},
        prefixes_of(block),
    )
