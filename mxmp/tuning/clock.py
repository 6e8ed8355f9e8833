"""How long a graph takes, operator by operator and as one step, on arrays of its own.

Each operator is timed in its place in the network: MXNet's executors call back after every operator, forward and
backward, and the callback waits for it. So it meets the layouts (oneDNN's blocked ones), the caches and the memory
that it meets in training, which it would not in a graph of its own: BatchNorm after a plain array takes five times as
long as after a convolution.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections import Counter
from contextlib import suppress
from typing import Any, Callable, Mapping, NamedTuple, Union

import mxnet as mx
import numpy as np
from mxnet.base import NDArrayHandle
from mxnet.ndarray import NDArray

from ..callbacks import KeptError, hold_interrupts
from ..kernels.fusion import Unfused
from ..pipeline import emitted
from ..precision.casts import FULL, CastGraph, declare_full, is_ours
from ..precision.graph import Entry, Graph, Node
from ..precision.plan import Plan, PlannedGraph
from ..precision.rules import rule_of
from .stand_ins import put_stand_ins, with_stand_ins

__all__ = ["Arrays", "Cast", "Owner", "Timed"]


class Cast(NamedTuple):
    """The cast of a tensor of the planned graph, forward and backward."""

    entry: Entry
    to_full: bool


# What a measured time belongs to: an operator of the planned graph, or a cast.
Owner = Union[Node, Cast]


class Arrays:
    """The inputs, weights, gradients and running statistics that all plans of a graph share; none is the user's.

    Parameters
    ----------
    graph : Graph
    ctx : mxnet.Context
    grad_req : mapping of str to str
        The requested gradients of variables, by name; others have none.
    values : mapping of str to NDArray
        The inputs that are known.
    shapes : mapping of str to tuple of int
        The shapes of the other inputs, whose values are drawn, as those of parameters are.
    large_inputs : bool
        For ``fit_to_device``.
    """

    def __init__(
        self,
        graph: Graph,
        ctx: mx.Context,
        grad_req: Mapping[str, str],
        values: Mapping[str, NDArray],
        shapes: Mapping[str, tuple[int, ...]],
        large_inputs: bool = False,
    ) -> None:
        symbol = with_stand_ins(graph).to_symbol()
        known = {**shapes, **{name: value.shape for name, value in values.items()}}
        sizes, _, states = symbol.infer_shape(**known)
        dtypes = {**dict.fromkeys(shapes, np.float32), **{name: value.dtype for name, value in values.items()}}
        types = symbol.infer_type_partial(**dtypes)[0]
        self.ctx, self.grad_req, self.large_inputs = ctx, dict(grad_req), large_inputs
        rng = np.random.RandomState(0)
        read_exactly = _read_exactly(graph)
        self.arguments = {
            name: values[name].copyto(ctx)
            if name in values
            else mx.nd.array(_drawn(name, size, rng, name in read_exactly), ctx=ctx, dtype=dtype or np.float32)
            for name, size, dtype in zip(symbol.list_arguments(), sizes, types)
        }
        self.gradients = {
            name: mx.nd.zeros_like(self.arguments[name])
            for name, request in grad_req.items()
            if request != "null" and name in self.arguments
        }
        self.states = {
            name: mx.nd.array(_drawn(name, size, rng, True), ctx=ctx)
            for name, size in zip(symbol.list_auxiliary_states(), states)
        }


def _read_exactly(graph: Graph) -> set[str]:
    """Return the variables that no operator reads as values to compute with: labels, indices, gamma and beta."""
    rules = {}
    for entry, users in graph.consumers().items():
        if entry.node.is_variable:
            rules[entry.node.name] = all(position in rule_of(node.op).keep for node, position in users)
    return {name for name, exactly in rules.items() if exactly}


def _drawn(name: str, shape: tuple[int, ...], rng: np.random.RandomState, exactly: bool) -> np.ndarray:
    """Return values that keep activations and gradients far from overflow and from denormals, which are slow."""
    if exactly:
        return np.full(shape, float(name.endswith(("gamma", "var"))), "float32")
    fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 1
    return rng.normal(0, (2 / max(fan_in, 1)) ** 0.5 if name.endswith("weight") else 1, shape).astype("float32")


class Timed:
    """The graph that runs under one plan, bound.

    Parameters
    ----------
    graph : Graph
    plan : Plan
    arrays : Arrays
    training : bool
        Whether a step is a forward and a backward, or a forward alone.
    before_each : callable, optional
        Called in a first step, operator by operator, with the owner of what runs next; with None after that step.

    Attributes
    ----------
    operators : Counter
        The number of operators that run for each owner.

    Raises
    ------
    mxnet.MXNetError
        From any method: a kernel is missing, or memory.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        arrays: Arrays,
        training: bool,
        before_each: Callable[[Owner | None], None] | None = None,
    ) -> None:
        casted = emitted(graph, plan, arrays.grad_req, large_inputs=arrays.large_inputs)
        declare_full(casted.graph)
        stand_ins = put_stand_ins(casted.graph)
        casted.source.update({new: casted.source[node] for new, node in stand_ins.items()})
        owners = _owners(casted)
        self.operators = Counter(owners.values())
        # By name, so that a callback knows which operator it is about.
        self._owners = list(owners.values())
        for number, node in enumerate(owners):
            node.name = f"n{number}"
        arguments, gradients = dict(arrays.arguments), dict(arrays.gradients) if training else {}
        for variable in PlannedGraph(graph, plan).low_variables:
            for held in (arguments, gradients):
                if variable.name in held:
                    held[variable.name] = held[variable.name].astype(casted.compute)
        self._training = training
        symbol = casted.graph.to_symbol()
        self._executor = _bind(symbol, arrays, arguments, gradients)
        outputs = self._executor.outputs
        # Drawn: of equal ones, normalization leaves nothing but denormals, which FP32 takes 100 times as long for.
        rng = np.random.RandomState(1)
        self._head_gradients = [
            mx.nd.array(rng.normal(0, 1, out.shape), arrays.ctx).astype(out.dtype) for out in outputs
        ]
        if before_each is not None:
            self._try(_bind(symbol, arrays, arguments, gradients), before_each)
        self.step()

    def step(self) -> float:
        """Return the seconds of one forward, and in training one backward."""
        return self._step(self._executor)

    def profile(self) -> dict[Owner, float]:
        """Return the seconds of each operator and each cast, forward and backward together, in one step.

        What MXNet adds (sums of gradients) counts for the operator whose backward follows. From then on every step
        runs operator by operator.
        """
        spent: dict[Owner, float] = {}
        times = {"last": 0.0, "pending": 0.0}

        def note(owner: Owner | None) -> None:
            times["pending"] += time.perf_counter() - times["last"]
            if owner is not None:
                spent[owner] = spent.get(owner, 0.0) + times["pending"]
                times["pending"] = 0.0
            times["last"] = time.perf_counter()

        mx.nd.waitall()
        times["last"] = time.perf_counter()
        self._run(self._executor, note)
        return spent

    def _try(self, executor: mx.executor.Executor, before_each: Callable[[Owner | None], None]) -> None:
        with suppress(mx.MXNetError):  # of the monitor, or the step that follows raises it too
            self._run(executor, lambda owner: None if owner is None else before_each(owner), monitor_all=True)
        before_each(None)

    def _run(
        self, executor: mx.executor.Executor, note: Callable[[Owner | None], None], monitor_all: bool = False
    ) -> None:
        """Run one step operator by operator, and call ``note`` with the owner of each output that is there.

        None stands for what belongs to nobody. ``monitor_all``: of each input too, before it is read.
        """
        owners, error = self._owners, KeptError()  # not self, which the executor would keep alive

        def call(name: bytes | str, handle: Any) -> None:
            with error:
                NDArray(ctypes.cast(handle, NDArrayHandle), writable=False)  # ours to free
                mx.nd.waitall()
                found = re.match(r"n(\d+)_", name.decode() if isinstance(name, bytes) else name)
                note(owners[int(found.group(1))] if found else None)

        executor.set_monitor_callback(call, monitor_all)
        self._step(executor)
        error.raise_it()

    def _step(self, executor: mx.executor.Executor) -> float:
        mx.nd.waitall()
        with hold_interrupts():
            start = time.perf_counter()
            executor.forward(is_train=self._training)
            if self._training:
                executor.backward(self._head_gradients)
            mx.nd.waitall()
            return time.perf_counter() - start


def _owners(casted: CastGraph) -> dict[Node, Owner]:
    """Return what the time of each operator of the emitted graph belongs to.

    What mxmp puts before a cast or an operator, to have it right, belongs to that one.
    """
    casts = {}
    for cast in casted.casts:
        entry = cast.inputs[0]
        while is_ours(entry.node):
            entry = entry.node.inputs[0]
        casts[cast] = Cast(entry._replace(node=casted.source[entry.node]), cast.attrs["dtype"] == FULL)
    nodes = [node for node in casted.graph.nodes() if not node.is_variable]
    reader: dict[Node, Node] = {}
    for node in nodes:
        for entry in node.inputs:
            reader.setdefault(entry.node, node)
    owners: dict[Node, Owner] = {}
    for node in reversed(nodes):
        owners[node] = casted.source.get(node) or casts.get(node) or owners[reader[node]]
    return owners


def _bind(
    symbol: mx.sym.Symbol, arrays: Arrays, arguments: dict[str, NDArray], gradients: dict[str, NDArray]
) -> mx.executor.Executor:
    """Bind without MXNet's fusion, which neither Gluon nor mxmp's ``Module`` uses."""
    if arrays.ctx.device_type == "cpu":
        symbol = Unfused(symbol)
    requests = {name: arrays.grad_req.get(name, "null") if name in gradients else "null" for name in arguments}
    return symbol.bind(arrays.ctx, arguments, gradients or None, requests, arrays.states)
