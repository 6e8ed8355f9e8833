"""How long a graph takes, operator by operator and as a whole, on arrays of its own.

Each operator is timed in its place in the network: MXNet's executors call back after every operator, forward and
backward, and the callback waits for it. So it meets the layouts (oneDNN's blocked ones), the caches and the memory
that it meets in training, which it would not in a graph of its own: BatchNorm behind a plain array takes five times as
long as behind a convolution.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections import Counter
from typing import Any, Mapping, NamedTuple, Union

import mxnet as mx
import numpy as np
from mxnet.base import NDArrayHandle
from mxnet.ndarray import NDArray

from ..callbacks import KeptError, hold_interrupts
from ..pipeline import emitted
from ..policy import Policy
from ..precision.casts import FULL, CastGraph, declare_full, is_ours
from ..precision.graph import Entry, Graph, Node
from ..precision.plan import Plan, PlannedGraph
from ..precision.rules import rule_of
from ..symbolic._mxnet import Unfused

__all__ = ["Arrays", "Cast", "Owner", "Timed"]


class Cast(NamedTuple):
    """The cast of a tensor of the planned graph, forward and backward."""

    entry: Entry
    to_full: bool


_DROPOUT = ("Dropout", "_npx_dropout")

# What a measured time belongs to: an operator of the planned graph, or a cast.
Owner = Union[Node, Cast]


class Arrays:
    """Inputs, weights, gradients and running statistics that all plans of a graph share; none is the user's.

    ``values``: of inputs. ``shapes``: of other inputs; what they hold is drawn. ``grad_req``: of variables, by name;
    of others nothing is asked. ``large_inputs``: see ``fit_to_device``.
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
        symbol = graph.to_symbol()
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
            for name, asked in grad_req.items()
            if asked != "null" and name in self.arguments
        }
        self.states = {
            name: mx.nd.array(_drawn(name, size, rng, True), ctx=ctx)
            for name, size in zip(symbol.list_auxiliary_states(), states)
        }


def _read_exactly(graph: Graph) -> set[str]:
    """Variables that no operator reads as values to compute with: labels, indices, gamma and beta."""
    rules = {}
    for entry, users in graph.consumers().items():
        if entry.node.is_variable:
            rules[entry.node.name] = all(position in rule_of(node.op).keep for node, position in users)
    return {name for name, exactly in rules.items() if exactly}


def _drawn(name: str, shape: tuple[int, ...], rng: np.random.RandomState, exactly: bool) -> np.ndarray:
    """Values that keep activations and gradients far from overflow and from denormals, which are slow."""
    if exactly:
        return np.full(shape, float(name.endswith(("gamma", "var"))), "float32")
    fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 1
    return rng.normal(0, (2 / max(fan_in, 1)) ** 0.5 if name.endswith("weight") else 1, shape).astype("float32")


class Timed:
    """One plan, bound; None: the graph as it is. ``step`` runs it; ``profile`` says how long each of its parts takes.

    ``operators``: how many emitted ones each part is made of.

    Raises
    ------
    mxnet.MXNetError
        From any method: a kernel is missing, or memory.
    """

    def __init__(self, graph: Graph, plan: Plan | None, arrays: Arrays, training: bool) -> None:
        if plan is None:
            copy = Graph.from_json(graph.to_json(), numpy=graph.numpy)
            casted = CastGraph(copy, Policy("bfloat16"), [], {}, dict(zip(copy.nodes(), graph.nodes())))
        else:
            casted = emitted(graph, plan, arrays.grad_req, large_inputs=arrays.large_inputs)
            declare_full(casted.graph)
        _without_draws(casted.graph, training)
        self._owners = _owners(casted)
        self.operators = Counter(self._owners.values())
        # Names that tell which operator a callback is about.
        self._numbered = list(self._owners)
        for number, node in enumerate(self._numbered):
            node.name = f"n{number}"
        arguments, gradients = dict(arrays.arguments), dict(arrays.gradients) if training else {}
        for variable in PlannedGraph(graph, plan).low_variables if plan else ():
            for held in (arguments, gradients):
                if variable.name in held:
                    held[variable.name] = held[variable.name].astype(casted.compute)
        self._training = training
        self._executor = _bind(casted.graph, arrays, arguments, gradients)
        outputs = self._executor.outputs
        # Drawn: of equal ones, normalisation leaves nothing but denormals, which FP32 takes 100 times as long for.
        rng = np.random.RandomState(1)
        self._heads = [mx.nd.array(rng.normal(0, 1, out.shape), arrays.ctx).astype(out.dtype) for out in outputs]
        self.step()

    def step(self) -> float:
        """Seconds that one forward takes, and in training one backward."""
        mx.nd.waitall()
        with hold_interrupts():
            start = time.perf_counter()
            self._executor.forward(is_train=self._training)
            if self._training:
                self._executor.backward(self._heads)
            mx.nd.waitall()
            return time.perf_counter() - start

    def profile(self) -> dict[Owner, float]:
        """Seconds that each operator and each cast takes, forward and backward together, in one step.

        What MXNet adds (sums of gradients) counts for the operator whose backward follows. From then on every step
        runs operator by operator.
        """
        spent: dict[Owner, float] = {}
        state = {"last": 0.0, "pending": 0.0}
        owners = [self._owners[node] for node in self._numbered]  # not self, which the executor would keep alive
        failed = KeptError()

        def note(name: bytes | str, handle: Any) -> None:
            with failed:
                NDArray(ctypes.cast(handle, NDArrayHandle), writable=False)  # ours to free
                mx.nd.waitall()
                now = time.perf_counter()
                found = re.match(r"n(\d+)_", name.decode() if isinstance(name, bytes) else name)
                state["pending"] += now - state["last"]
                if found:
                    owner = owners[int(found.group(1))]
                    spent[owner] = spent.get(owner, 0.0) + state["pending"]
                    state["pending"] = 0.0
                state["last"] = time.perf_counter()

        self._executor.set_monitor_callback(note)
        mx.nd.waitall()
        state["last"] = time.perf_counter()
        self.step()
        failed.raise_it()
        return spent


def _without_draws(graph: Graph, training: bool) -> None:
    """Put a scaling in place of each Dropout that would draw: MXNet has one random generator, the user's.

    On a CPU all contexts share it, and its state can be neither read nor set. Drawing a mask takes as long in every
    plan.
    """
    for node in graph.nodes():
        if node.op in _DROPOUT and (training or node.attrs.get("mode") == "always"):
            node.op, node.attrs = "_mul_scalar", {"scalar": "2.0"}


def _owners(casted: CastGraph) -> dict[Node, Owner]:
    """What the time of each operator of the emitted graph belongs to.

    What mxmp puts in front of a cast or an operator, to have it right, belongs to that one.
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
    graph: Graph, arrays: Arrays, arguments: dict[str, NDArray], gradients: dict[str, NDArray]
) -> mx.executor.Executor:
    """Without MXNet's fusion, which ``Module`` of mxmp's goes without, and Gluon too."""
    symbol, ctx, groups = graph.to_symbol(), arrays.ctx, {}
    if ctx.device_type == "cpu":
        symbol, groups = Unfused(symbol), {Unfused.GROUP: ctx}
        ctx = mx.Context(ctx.device_type, ctx.device_id + 1)
    asked = {name: arrays.grad_req.get(name, "null") if name in gradients else "null" for name in arguments}
    return symbol.bind(ctx, arguments, gradients or None, asked, arrays.states, group2ctx=groups or None)
