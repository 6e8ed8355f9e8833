"""Replays of a batch with some operators in low precision, and what each changes against FP32 and beside the noise."""

from __future__ import annotations

import math
from typing import Callable, Collection, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ...frontend import ReplayedGraph, ReplayedNetwork
from ...pipeline import emitted
from ...precision.graph import Entry, Graph
from ...precision.heads import SCALE_NAME, scale_heads
from ...precision.plan import Plan
from .lost import ROUNDOFF
from .report import Change
from .still import in_fp32, stilled

# An operator in low precision: the number of its graph, and its name in the plan.
Candidate = tuple
# The factor by which a loss scale is lowered that is too high.
_BACKOFF = 2.0**-4
# The relative noise above which a number has no digit that could be compared.
_UNKNOWN = 0.5
_FP32_NOISE = 2.0**-20  # what FP32's own rounding does to a column that is nearly constant


class Values(NamedTuple):
    """What one replay computed: losses, the gradient of each parameter by name, and outputs as rows of columns."""

    losses: list[np.ndarray]
    gradients: dict[str, np.ndarray]
    outputs: list[np.ndarray]

    @property
    def is_finite(self) -> bool:
        return all(np.isfinite(each).all() for each in [*self.losses, *self.gradients.values(), *self.outputs])


class Differences(NamedTuple):
    """How far one replay is from FP32's: relative sizes, as ``Change`` has them."""

    loss: float
    gradients: np.ndarray
    outputs: list[np.ndarray]


class _Stilled(NamedTuple):
    graph: Graph
    plan: Plan
    drawn: dict[str, NDArray]


class Replays:
    """Runs the batch of a network with chosen operators in low precision, and counts the runs."""

    def __init__(self, network: ReplayedNetwork, seed: int = 0) -> None:
        self._network = network
        self._rng = np.random.RandomState(seed)
        self._seed = seed
        self.count = 0
        # Known after the first replay.
        self.graphs: list[ReplayedGraph] = []
        # Multiplies the loss; the gradients are divided by it again.
        self.loss_scale = 1.0
        self._stilled: dict[tuple, _Stilled] = {}
        self._arrays: dict[str, NDArray] = {}
        self._inputs: dict[int, Mapping[str, NDArray]] = {}
        self.reference = self.run(())

    @property
    def candidates(self) -> list[Candidate]:
        """Return the operators in low precision by the network's plans, in the order of the graphs."""
        return [(g.number, name) for g in self.graphs for name, d in g.plan.decisions.items() if d.low]

    def run_scaled(self, low: Collection[Candidate]) -> Values:
        """Run at a loss scale at which no gradient overflows, if there is one >= 1, and keep it for later replays."""
        while True:
            values = self.run(low)
            overflows = values._replace(gradients={}).is_finite and not values.is_finite
            if not overflows or self.loss_scale <= 1:
                return values
            self.loss_scale = max(1.0, self.loss_scale * _BACKOFF)

    def run(self, low: Collection[Candidate], perturb: float = 0.0) -> Values:
        """Run the batch with ``low`` in low precision; ``perturb`` is the relative size of errors in the weights."""
        self.count += 1
        low = set(low)
        ops: dict[tuple, tuple[mx.nd.CachedOp, list[str], bool]] = {}
        outputs: list[NDArray] = []
        variables = {} if perturb else self._arrays

        def runner(graph: ReplayedGraph, inputs: Mapping[str, NDArray]) -> list[NDArray]:
            key = (graph.number, tuple(array.shape for array in inputs.values()))
            still = self._still(graph, inputs, key)
            if key not in ops:
                ops[key] = self._made(graph, still, lambda name: (graph.number, name) in low, inputs)
            with autograd.pause():
                for name, value in graph.values.items():
                    if name not in variables:
                        variables[name] = self._perturbed(graph, name, value, perturb)
                        if name in graph.trained and self._network.training:
                            variables[name].attach_grad()
            op, names, scaled = ops[key]
            auxiliary = set(graph.symbol.list_auxiliary_states())
            given: dict[str, NDArray] = {**inputs, **still.drawn}
            ctx = next(iter({**inputs, **graph.values}.values())).ctx
            if scaled:
                given[SCALE_NAME] = mx.nd.full((1,), self.loss_scale, ctx=ctx)
            values = [
                (graph.values[name].copy() if name in auxiliary else variables[name])
                if name in graph.values
                else given[name]
                for name in names
            ]
            out = op(*values)
            outs = [out] if isinstance(out, NDArray) else list(out)
            outputs.extend(outs)
            return outs

        outs, losses = self._network.replay(runner)
        gradients = self._gradients(outs, losses, outputs, variables) if self._network.training else {}
        as_rows = [_full(each).reshape(-1, each.shape[-1] if each.ndim > 1 else 1) for each in outs if _is_float(each)]
        return Values([_full(each).ravel() for each in losses], gradients, as_rows)

    def _gradients(
        self,
        outs: Sequence[NDArray],
        losses: Sequence[NDArray],
        outputs: Sequence[NDArray],
        variables: Mapping[str, NDArray],
    ) -> dict[str, np.ndarray]:
        trained = {name for graph in self.graphs for name in graph.trained if variables[name].grad is not None}
        names = sorted(trained)
        if not names:
            return {}
        heads = [each for each in (losses or outs) if _is_float(each)]
        scales = [mx.nd.full(each.shape, self.loss_scale, ctx=each.ctx, dtype=each.dtype) for each in heads]
        # Every output of a graph is a head, so that autograd reaches every parameter.
        others = [each for each in outputs if _is_float(each) and not any(each is head for head in heads)]
        zeros = [mx.nd.zeros(each.shape, ctx=each.ctx, dtype=each.dtype) for each in others]
        found = autograd.grad([*heads, *others], [variables[n] for n in names], [*scales, *zeros], retain_graph=False)
        return {name: _full(each) / self.loss_scale for name, each in zip(names, found)}

    def _still(self, graph: ReplayedGraph, inputs: Mapping[str, NDArray], key: tuple) -> _Stilled:
        if key not in self._stilled:
            if not any(each is graph for each in self.graphs):
                self.graphs.append(graph)
                self._inputs[graph.number] = dict(inputs)
            shapes = {name: array.shape for name, array in {**inputs, **graph.values}.items()}
            made, plan, drawn = stilled(graph, shapes, self._seed + graph.number)
            ctx = next(iter({**inputs, **graph.values}.values())).ctx
            arrays = {name: mx.nd.array(value, ctx=ctx, dtype="float32") for name, value in drawn.items()}
            self._stilled[key] = _Stilled(made, plan, arrays)
        return self._stilled[key]

    def _made(
        self, graph: ReplayedGraph, still: _Stilled, low: Callable[[str], bool], inputs: Mapping[str, NDArray]
    ) -> tuple[mx.nd.CachedOp, list[str], bool]:
        """Return a CachedOp of one variant of a graph, the names of its inputs, and whether it reads the loss scale."""
        plan = in_fp32(still.plan, low)
        requested = {name: "write" if name in graph.trained else "null" for name in graph.values}
        requested.update(dict.fromkeys([*inputs, *still.drawn], "write" if graph.number else "null"))
        made = emitted(still.graph, plan, requested).graph
        dtypes = {name: array.dtype for name, array in inputs.items()}
        scaled = self._network.training and scale_heads(made, dtypes)
        symbol = made.to_symbol()
        return mx.nd.CachedOp(symbol), symbol.list_inputs(), scaled

    def tapped(self, graph: ReplayedGraph, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return FP32's values around operators: ``"name"``, ``"name < i"`` of its input i and ``"name > reader"``."""
        inputs = self._inputs[graph.number]
        key = (graph.number, tuple(array.shape for array in inputs.values()))
        still = self._stilled[key]
        readers = still.graph.consumers()
        heads: dict[str, Entry] = {}
        for node, name in still.graph.names().items():
            if name in names:
                heads[name] = Entry(node)
                heads.update({f"{name} < {i}": entry for i, entry in enumerate(node.inputs)})
                users = [user for user, _ in readers.get(Entry(node), ())]
                heads.update({f"{name} > {user.name}": Entry(user) for user in users})
        if not heads:
            return {}
        graph_of = Graph(list(heads.values()), still.graph.attrs, numpy=still.graph.numpy)
        symbol = graph_of.to_symbol()
        values = {**graph.values, **inputs, **still.drawn}
        with autograd.pause(train_mode=graph.training):
            out = mx.nd.CachedOp(symbol)(*(values[name].copy() for name in symbol.list_inputs()))
        outs = [out] if isinstance(out, NDArray) else out
        return {name: _full(each) for name, each in zip(heads, outs)}

    def _perturbed(self, graph: ReplayedGraph, name: str, value: NDArray, size: float) -> NDArray:
        copy = value.copy()
        if size and name in graph.trained and copy.ndim >= 2 and _is_float(copy):
            copy[:] = copy.asnumpy() * self._rng.uniform(1 - size, 1 + size, copy.shape).astype(np.float32)
        return copy

    # -- against FP32 ------------------------------------------------------------------------------

    def differences(self, got: Values) -> Differences:
        fp32 = self.reference
        losses = [_relative(a, b) for a, b in zip(fp32.losses, got.losses)]
        gradients = np.array([_relative(value, got.gradients[name]) for name, value in fp32.gradients.items()])
        outputs = [_by_column(a, b) for a, b in zip(fp32.outputs, got.outputs)]
        return Differences(max(losses, default=0.0), gradients, outputs)


class Noise:
    """How far errors of two roundings in the weights move each number: the unit in which changes are counted."""

    def __init__(self, replays: Replays, compute: str, rounds: int = 3) -> None:
        least = ROUNDOFF[compute]
        # Inputs get no errors: an operator that needs their last digits would make noise itself, and not stand out.
        found = [replays.differences(replays.run((), 2 * least)) for _ in range(rounds)]
        self._loss = float(_floored(np.array([[each.loss] for each in found]), least)[0])
        self._gradients = _floored(np.array([each.gradients for each in found]), least)
        self._outputs = [_floored(np.array(each), least) for each in zip(*(found_.outputs for found_ in found))]
        self._names = list(replays.reference.gradients)
        self._has_loss = bool(replays.reference.losses)

    def change(self, found: Differences) -> Change:
        """Return a Change, with the parameter and the column that changed most in units of their noise."""
        most = _ratio(np.array([found.loss]), np.array([self._loss]))[0]
        gradient, parameter = None, ""
        if self._names:
            ratios = _ratio(found.gradients, self._gradients)
            worst = int(np.argmax(ratios))
            gradient, parameter, most = float(found.gradients[worst]), self._names[worst], max(most, ratios[worst])
        output, number, column = 0.0, 0, 0
        largest = -1.0
        for i, (each, noise) in enumerate(zip(found.outputs, self._outputs)):
            ratios = _ratio(each, noise)
            worst = int(np.argmax(ratios)) if ratios.size else 0
            if ratios.size and ratios[worst] > largest:
                largest, output, number, column = float(ratios[worst]), float(each[worst]), i, worst
        loss = found.loss if self._has_loss else None
        return Change(loss, gradient, parameter, output, number, column, float(max(most, largest)))


def _ratio(change: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Return ``change / noise``; inf where the change is, 0 where only the noise is."""
    return np.where(
        np.isinf(change), math.inf, np.where(np.isinf(noise), 0.0, np.where(np.isinf(change), 1.0, change) / noise)
    )


def _floored(found: np.ndarray, least: float) -> np.ndarray:
    """Return the largest of each column of ``found``, at least their median and ``least``; inf for what is unknown."""
    largest = found.max(axis=0) if found.size else np.zeros(found.shape[1:])
    # A number that moves by half of itself is 0 but for rounding, as the gradient of a bias before BatchNorm.
    known = largest <= _UNKNOWN
    middle = float(np.median(largest[known])) if known.any() else least
    return np.where(known, np.maximum(largest, max(middle, least)), math.inf)


def _relative(before: np.ndarray, after: np.ndarray) -> float:
    if not np.isfinite(before).all():
        return 0.0  # nothing to compare with
    if not np.isfinite(after).all():
        return math.inf
    size = float(np.linalg.norm(before.ravel()))
    change = float(np.linalg.norm((after - before).ravel()))
    return change / size if size else (math.inf if change else 0.0)


def _by_column(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return for each column the root mean square of the difference, divided by the column's own deviation."""
    size = np.abs(before).max(axis=0, initial=0)
    spread = before.std(axis=0) if len(before) > 1 else np.full(before.shape[1:], before.std())
    everywhere = float(before.std())
    spread = np.where(spread > _FP32_NOISE * size, spread, np.maximum(everywhere, _FP32_NOISE * size))
    with np.errstate(invalid="ignore", over="ignore"):
        change = np.sqrt(np.mean((after - before) ** 2, axis=0)) / np.maximum(spread, 1e-30)
    lost = np.isfinite(before).all(axis=0) & ~np.isfinite(after).all(axis=0)
    return np.where(lost, math.inf, np.nan_to_num(change, nan=0.0, posinf=0.0))


def _full(array: NDArray) -> np.ndarray:
    if np.dtype(array.dtype).names:  # bfloat16
        array = mx.nd.amp_cast(array, dtype="float32")
    return array.asnumpy().astype(np.float32, copy=False)


def _is_float(array: NDArray) -> bool:
    dtype = np.dtype(array.dtype)
    return bool(dtype.names) or dtype.kind == "f"
