"""What ``tune`` is to plan, as data that another process can read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Collection, Iterable, Mapping, NamedTuple

import mxnet as mx
from mxnet.gluon import Block, Constant, HybridBlock
from mxnet.ndarray import NDArray

from ..frontend import instead
from ..gluon._mxnet import contexts
from ..gluon.blocks import prefixes_of
from ..gluon.graphs import read_inputs, traced_alone
from ..policy import Policy
from ..precision._mxnet import is_numpy
from ..precision.casts import strip
from ..precision.graph import Graph, as_shape
from .stand_ins import described


class Crash(NamedTuple):
    """One crash of the process in which ``tune`` measures: plan and operator that ran, and how the process ended.

    The next process does not run this plan again, and keeps in FP32 those of ``operators`` that are in ``low``.

    Attributes
    ----------
    low : frozenset of str
        The names of the operators that compute in low precision under the plan that ran.
    operators : tuple of str
        The name of the operator that ran when the process ended. If a cast to FP32 ran, the name of the operator that
        returns the tensor; if a cast to low precision ran, the names of the low-precision operators that read it. Empty
        if a whole step ran.
    how : str
        The signal that ended the process, for example ``"SIGSEGV"``, or its exit status, ``"exit status 1"``.
    """

    low: frozenset[str]
    operators: tuple[str, ...]
    how: str


@dataclass(frozen=True)
class Job:
    """What the process in which ``tune`` measures must know: the network, and how and where it is going to run.

    Only the arrays in ``values`` are objects of the user's.

    Attributes
    ----------
    symbol : str
        JSON of the network, in FP32 or converted, as ``stand_ins.described`` writes it.
    numpy : tuple of three bool
        Whether the network is a Symbol of ``mx.sym.np``; whether MXNet's NumPy shapes, and whether its NumPy arrays,
        were switched on where ``tune`` was called.
    policy : Policy
    ctx : mxnet.Context
        The device to measure on.
    training : bool
        True if a step is a forward and a backward, False if it is a forward alone.
    inputs : mapping of str to tuple of int
        The shape of every input by its name. All other variables are parameters and auxiliary states.
    values : mapping of str to NDArray
        The inputs that the user gave as arrays, by name.
    grad_req : mapping of str to str
        ``"write"``, ``"add"`` or ``"null"`` for each parameter by its name; a variable that is missing has no gradient.
    parameters : list of str, optional
        The names of a block's parameters, without constants. None if ``tune`` was called with a Symbol: no plan may
        then rename its outputs by a cast (``keep_output_names`` of ``choices.Task``).
    learned : list of str
        The names of all parameters, and of a block without constants.
    blocks : tuple of str
        The prefixes of the block and of all blocks in it, as ``Plan.blocks`` holds them; empty for a Symbol.
    stand_ins : list of str
        Types and names (``"my_op 'custom0'"``) of the operators that only the user's process can run. Operators
        of MXNet's own, with tensors of the same shapes, are timed in their place.
    seconds : dict of str to float
        The times of operators and casts from earlier runs, by the keys of ``table.Table``. New times are added to it.
    crashes : tuple of Crash
        How the earlier processes for this job ended.
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
    learned: Collection[str]
    blocks: tuple[str, ...]
    stand_ins: list[str]
    seconds: dict[str, float] = field(default_factory=dict)
    crashes: tuple[Crash, ...] = ()

    def graph(self) -> Graph:
        """Return a new FP32 graph of the network, without the casts and workarounds that mxmp may have inserted.

        It has the operators that only the user's process can run, not stand-ins for them.
        """
        return strip(Graph.from_json(self.symbol, numpy=self.numpy[0]))


def context_of(target: Block | mx.sym.Symbol, inputs: Iterable[Any]) -> mx.Context:
    """Return where a network runs: where its parameters are, or else the arrays in ``inputs``, or the current context.

    ``inputs`` are positional or named inputs: arrays, shapes, or lists of them.
    """
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
) -> Job:
    """Return the job for one call of ``tune``: what the process that measures must know, as data to be pickled.

    ``target`` is not changed, and no operator runs. ``inputs`` are the positional inputs of ``tune``, ``named`` those
    of a Symbol by name. Raises ``TypeError`` if ``target`` is neither a Block nor a Symbol. Raises ``ValueError`` if
    the inputs do not fit ``target``, if a Block is no HybridBlock or cannot be traced, and, with ``measure=True``, if
    the body of a loop or condition has an operator that only this process can run, as that gets no stand-in.
    """
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
            raise ValueError("give a block its inputs, or their shapes, in order: named inputs are for Symbols")
        if not isinstance(target, HybridBlock):
            raise ValueError(f"{target.name!r} runs as Python, which has no plan: tune the HybridBlocks in it")
        arrays, empty = read_inputs(inputs)
        symbol, found, params = traced_alone(target, arrays, training)
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
        inputs=shapes,
        values=values,
        grad_req=grad_req or {name: "write" for name in names if name not in shapes},
        parameters=parameters,
        learned=[name for name in names if name not in shapes] if parameters is None else parameters,
        blocks=blocks,
        stand_ins=stand_ins,
    )
