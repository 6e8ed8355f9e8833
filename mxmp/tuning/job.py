"""What ``tune`` is to plan, as data that another process can read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Collection, Iterable, Mapping, NamedTuple

import mxnet as mx
from mxnet.gluon import Block, Constant, HybridBlock
from mxnet.ndarray import NDArray

from ..gluon._mxnet import contexts
from ..gluon.blocks import prefixes_of
from ..gluon.symbols import read_inputs, traced_call
from ..messages.networks import instead
from ..messages.shapes import as_shape
from ..messages.text import did_you_mean
from ..policy import Policy
from ..precision._mxnet import is_numpy
from .stand_ins import described

_KEYWORDS = ("policy", "exclude", "training", "optimizer", "measure", "ctx", "cache", "progress")  # of ``tune``


class Crash(NamedTuple):
    """A crash of the process that measures: the next one does not run this plan again."""

    low: frozenset[str]  # the operators in low precision under the plan that ran
    operators: tuple[str, ...]  # what ran; of a cast, what returns or reads the tensor; () in a whole step
    how: str  # "SIGSEGV" or "exit status 1"


@dataclass(frozen=True)
class Job:
    """What the process that measures must know: the network, and how and where it is going to run."""

    symbol: str  # JSON, as ``stand_ins.described`` writes it, perhaps with casts
    numpy: tuple[bool, bool, bool]  # of the Symbol, np_shape, np_array
    policy: Policy
    ctx: mx.Context
    training: bool  # a step has a backward
    optimizer: str  # by which a step updates the weights then
    inputs: Mapping[str, tuple[int, ...]]
    values: Mapping[str, NDArray]  # of the inputs that were given as arrays: the user's own
    grad_req: Mapping[str, str]  # what is missing has no gradient
    parameters: Collection[str] | None  # a block's, without constants; None: a Symbol, whose outputs keep their names
    learned: Collection[str]
    blocks: tuple[str, ...]  # as ``Plan.blocks``; empty for a Symbol
    stand_ins: list[str]  # titles of the operators that only the user's process can run
    seconds: dict[str, float] = field(default_factory=dict)  # times of earlier runs by keys of ``Table``, added to
    crashes: tuple[Crash, ...] = ()


def context_of(target: Block | mx.sym.Symbol, inputs: Iterable[Any]) -> mx.Context:
    """Return where a network's parameters are, else where the arrays in ``inputs`` are, else the current context."""
    params = target.collect_params().values() if isinstance(target, Block) else ()
    arrays, left = [], list(inputs)
    while left:
        each = left.pop(0)
        if isinstance(each, NDArray):
            arrays.append(each.ctx)
        elif isinstance(each, (list, tuple)):
            left[:0] = each
    found = [*(ctx for param in params for ctx in contexts(param)), *arrays]
    return found[0] if found else mx.context.current_context()


def job_of(
    target: Block | mx.sym.Symbol,
    inputs: tuple,
    named: Mapping[str, Any],
    policy: Policy,
    ctx: mx.Context,
    training: bool,
    measure: bool,
    optimizer: str = "sgd",
) -> Job:
    """Return one call of ``tune`` as data to be pickled; ``target`` is not changed, and no operator runs."""
    blocks: tuple[str, ...] = ()
    parameters, grad_req = None, {}
    if isinstance(target, mx.sym.Symbol):
        if inputs:
            raise ValueError("name the inputs of a Symbol: tune(symbol, data=(32, 3, 224, 224))")
        symbol = target
        values = {name: value for name, value in named.items() if isinstance(value, NDArray)}
        shapes = {name: value.shape if name in values else as_shape(value, name) for name, value in named.items()}
    else:
        if not isinstance(target, Block):
            raise TypeError(f"tune takes a gluon HybridBlock or a Symbol, got {type(target).__name__}{instead(target)}")
        if named or not inputs:
            meant = did_you_mean(next(iter(named)), _KEYWORDS) if named else ""
            raise ValueError(f"give a block its inputs, or their shapes, in order: named inputs are for Symbols{meant}")
        if not isinstance(target, HybridBlock):
            raise ValueError(f"{target.name!r} runs as Python, which has no plan: tune the HybridBlocks in it")
        arrays, empty = read_inputs(inputs)
        symbol, found, params, _ = traced_call(target, arrays, training)
        values = {name: array for name, array in found.items() if all(array is not each for each in empty)}
        shapes = {name: array.shape for name, array in found.items()}
        parameters = [name for name, param in params.items() if not isinstance(param, Constant)]
        blocks = prefixes_of(target)
        grad_req = {name: param.grad_req for name, param in params.items()}
    names = symbol.list_inputs()
    unknown = sorted(set(shapes) - set(names))
    if unknown:
        raise ValueError(f"there is no input {unknown[0]!r}: it has {', '.join(names[:5])}, ...")
    text, stand_ins, inside_loops = described(symbol, shapes)
    if inside_loops and measure:
        raise ValueError(
            f"only this process can run {inside_loops[0]} in the body of a loop, and tune measures in another process: "
            "plan without measuring, by measure=False"
        )
    return Job(
        symbol=text,
        numpy=(is_numpy(symbol), mx.util.is_np_shape(), mx.util.is_np_array()),
        policy=policy,
        ctx=ctx,
        training=training,
        optimizer=optimizer,
        inputs=shapes,
        values=values,
        grad_req=grad_req or {name: "write" for name in names if name not in shapes},
        parameters=parameters,
        learned=[name for name in names if name not in shapes] if parameters is None else parameters,
        blocks=blocks,
        stand_ins=stand_ins,
    )
