"""Replays of a batch with some operators in low precision, and what each changes against FP32 and beside the noise."""

from __future__ import annotations

import math
from typing import Callable, Collection, Mapping, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ...pipeline import emitted
from ...precision.casts import copy_returned_inputs
from ...precision.graph import Entry, Graph, Node
from ...precision.heads import SCALE_NAME, scale_heads
from ...precision.plan import Plan
from ...step.scaler import MIN_SCALE
from ..networks.protocol import ReplayedGraph, ReplayedNetwork
from .arrays import full, is_float
from .lost import Around, loses_digits
from .report import Change
from .segments import Segments
from .still import in_fp32, stilled

# An operator in low precision: the number of its graph, and its name in the plan.
Candidate = tuple
# The factor by which a loss scale is lowered that is too high.
_BACKOFF = 2.0**-4
# From how many times the noise an operator stands out. Healthy networks reach 4 (see docs/looking-inside.md).
THRESHOLD = 8.0
# Changes that never stand out: of the loss, of a gradient, and of a column of an output.
_SMALL = (0.001, 0.02, 0.01)
# What rounding may change of the loss, of all gradients together, and of an output, beside the noise or not. A single
# operator of a healthy network changes them by less, or so do many (see docs/looking-inside.md).
LIMITS = (0.02, 0.5, 0.15)
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
    """How far one replay is from FP32's: relative sizes, as ``Change`` has them, each an array."""

    # Of the loss, of each gradient, and of each column of each output.
    numbers: list[np.ndarray]
    # Of the loss, of all gradients together, and of each output: the root mean square over its columns.
    wholes: tuple[float, float, float]


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
        # By graph and shapes of its inputs: see ``still.stilled``.
        self._stilled: dict[tuple, tuple[Graph, Plan, dict[str, NDArray]]] = {}
        # By the net, if it is another one, and name.
        self._arrays: dict[tuple[str, str], NDArray] = {}
        self._inputs: dict[int, Mapping[str, NDArray]] = {}
        self.reference = self.run(())

    @property
    def candidates(self) -> list[Candidate]:
        """Return the operators in low precision by the network's plans, in the order of the graphs."""
        return [(g.number, name) for g in self.graphs for name, d in g.plan.decisions.items() if d.low]

    def low_without(self, excluded: Collection[Candidate]) -> list[Candidate]:
        """Return the operators that stay in low precision if these are excluded, which may take others along."""
        other = {graph.number: graph.other for graph in self.graphs}
        found = []
        for graph in self.graphs:
            names = [name for number, name in excluded if other[number] == graph.other]
            plan = graph.excluding(names) if names else graph.plan
            found += [(graph.number, name) for name, d in plan.decisions.items() if d.low]
        return [each for each in self.candidates if each in found and each not in excluded]

    def readers_of_digits(self) -> list[Candidate]:
        """Return the operators in low precision that read raw data whose digits the dtype does not have: a column that
        its rounding moves by more than 2 % of its deviation, such as years or coordinates."""
        found = []
        for graph in self.graphs:
            low = {name for number, name in self.candidates if number == graph.number}
            if not graph.reads_data:
                continue
            still, *_ = self._still(graph, self._inputs[graph.number])
            data = set(self._inputs[graph.number])
            only_data: dict[Node, bool] = {}
            reading: dict[str, list[int]] = {}
            for node, name in still.names().items():
                of_data = [only_data[entry.node] for entry in node.inputs]
                only_data[node] = node.name in data if node.is_variable else bool(of_data) and all(of_data)
                if name in low and any(of_data):
                    reading[name] = [at for at, is_data in enumerate(of_data) if is_data]
            compute = graph.plan.policy.compute
            for name, around in self.tapped(graph, reading).items():
                if any(loses_digits(around.inputs[at], compute) for at in reading[name]):
                    found.append((graph.number, name))
        return found

    def run_scaled(self, low: Collection[Candidate]) -> Values:
        """Run at a loss scale at which no gradient overflows, if a scaler reaches one; later replays start from it."""
        while True:
            values = self.run(low)
            overflows = values._replace(gradients={}).is_finite and not values.is_finite
            if not overflows or self.loss_scale <= MIN_SCALE:
                return values
            self.loss_scale = max(MIN_SCALE, self.loss_scale * _BACKOFF)

    def run(self, low: Collection[Candidate], perturb: float = 0.0) -> Values:
        """Run the batch with ``low`` in low precision; ``perturb`` is the relative size of errors in the weights."""
        self.count += 1
        low = set(low)
        symbols: dict[tuple, mx.sym.Symbol] = {}
        segments = Segments()
        variables = {} if perturb else self._arrays

        def runner(graph: ReplayedGraph, inputs: Mapping[str, NDArray]) -> list[NDArray]:
            key = _key(graph, inputs)
            if key not in symbols:
                symbols[key] = self._converted(graph, inputs, lambda name: (graph.number, name) in low)
            with autograd.pause():
                for name in [name for name in graph.values if (graph.other, name) not in variables]:
                    variables[graph.other, name] = made = self._perturbed(graph, name, perturb)
                    if name in graph.trained and self._network.training:
                        made.attach_grad()
            running = graph.values.keys() & set(graph.symbol.list_auxiliary_states())
            own = {n: value.copy() if n in running else variables[graph.other, n] for n, value in graph.values.items()}
            if not autograd.is_recording():  # in inference, or a teacher that the loss calls within autograd.pause()
                return _outputs(symbols[key], {**self._given(graph, inputs), **own})
            read = segments.entered(inputs, {(graph.other, name): own[name] for name in graph.trained})
            return segments.left(_outputs(symbols[key], {**self._given(graph, read), **own}))

        outs, losses = self._network.replay(runner)
        heads = [each for each in losses or outs if is_float(each)] if self._network.training else []
        found = segments.gradients(heads, self.loss_scale)
        gradients = {f"{n} ({other})" if other else n: found[other, n] / self.loss_scale for other, n in sorted(found)}
        as_rows = [full(each).reshape(-1, each.shape[-1] if each.ndim > 1 else 1) for each in outs if is_float(each)]
        return Values([full(each).ravel() for each in losses], gradients, as_rows)

    def _still(self, graph: ReplayedGraph, inputs: Mapping[str, NDArray]) -> tuple[Graph, Plan, dict[str, NDArray]]:
        key = _key(graph, inputs)
        if key not in self._stilled:
            if graph.number not in self._inputs:
                self.graphs.append(graph)
                self._inputs[graph.number] = dict(inputs)
            self._stilled[key] = stilled(graph, inputs, self._seed + graph.number)
        return self._stilled[key]

    def _given(self, graph: ReplayedGraph, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Return what a graph in FP32 reads, by name, with what its random operators drew; and the loss scale."""
        *_, drawn = self._still(graph, inputs)
        values = {**graph.values, **inputs, **drawn}
        ctx = next(iter(values.values())).ctx
        return {**values, SCALE_NAME: mx.nd.full((1,), self.loss_scale, ctx=ctx)}

    def _converted(
        self, graph: ReplayedGraph, inputs: Mapping[str, NDArray], low: Callable[[str], bool]
    ) -> mx.sym.Symbol:
        """Return one variant of a graph; in training its loss heads may read the loss scale."""
        still, plan, drawn = self._still(graph, inputs)
        requested = {name: "write" if name in graph.trained else "null" for name in graph.values}
        # As ``Segments`` attaches them to what another graph has returned, also to a graph that was called before.
        requested.update({**dict.fromkeys(inputs, "add"), **dict.fromkeys(drawn, "null")})
        made = emitted(still, in_fp32(plan, low), requested).graph
        if self._network.training:
            scale_heads(made, {name: array.dtype for name, array in inputs.items()})
        copy_returned_inputs(made)
        return made.to_symbol()

    def tapped(self, graph: ReplayedGraph, names: Collection[str]) -> dict[str, Around]:
        """Return the operators ``names`` of a graph with FP32's values around them; those in bodies are missing."""
        inputs = self._inputs[graph.number]
        still, *_ = self._still(graph, inputs)
        readers = still.consumers()
        nodes = {name: node for node, name in still.names().items() if name in names}
        users = {node: [user for user, _ in readers.get(Entry(node), ())] for node in nodes.values()}
        heads = [e for node in users for e in (*node.inputs, Entry(node), *map(Entry, users[node]))]
        if not heads:
            return {}
        heads = list(dict.fromkeys(heads))
        tapped = Graph([*heads], still.attrs, numpy=still.numpy)
        copy_returned_inputs(tapped)
        with autograd.pause(train_mode=graph.training):
            values = {name: array.copy() for name, array in self._given(graph, inputs).items()}
            at = dict(zip(heads, map(full, _outputs(tapped.to_symbol(), values))))
        return {
            name: Around(
                node,
                [at[entry] for entry in node.inputs],
                at[Entry(node)],
                {user.name: at[Entry(user)] for user in users[node]},
            )
            for name, node in nodes.items()
        }

    def _perturbed(self, graph: ReplayedGraph, name: str, size: float) -> NDArray:
        copy = graph.values[name].copy()
        # Frozen weights too: which ones train says nothing about what rounding does to the forward.
        if size and name not in graph.constants and copy.ndim >= 2 and is_float(copy):
            copy[:] = copy.asnumpy() * self._rng.uniform(1 - size, 1 + size, copy.shape).astype(np.float32)
        return copy

    # -- against FP32 ------------------------------------------------------------------------------

    def differences(self, got: Values) -> Differences:
        fp32 = self.reference
        loss = max((_relative(a, b) for a, b in zip(fp32.losses, got.losses)), default=0.0)
        gradients = [_relative(value, got.gradients[name]) for name, value in fp32.gradients.items()]
        columns = list(map(_by_column, fp32.outputs, got.outputs))
        outputs = max((float(np.sqrt(np.mean(each**2))) for each in columns if each.size), default=0.0)
        together = [np.concatenate([v.gradients[n].ravel() for n in fp32.gradients]) for v in (fp32, got) if gradients]
        wholes = loss, _relative(*together) if together else 0.0, outputs
        return Differences([np.array([loss]), np.array(gradients), *columns], wholes)


class Noise:
    """How far errors of two roundings in the weights move each number: the unit in which changes are counted."""

    def __init__(self, replays: Replays, least: float, rounds: int = 3) -> None:
        """Measure it with errors of ``2 * least``, where ``least`` is the dtype's unit roundoff."""
        # Inputs get no errors: an operator that needs their last digits would make noise itself, and not stand out.
        found = [replays.differences(replays.run((), 2 * least)).numbers for _ in range(rounds)]
        small = [*_SMALL[:2], *[_SMALL[2]] * len(found[0])]
        self._noise = [
            np.maximum(_floored(np.array(each), least), much / THRESHOLD) for each, much in zip(zip(*found), small)
        ]
        self._names = list(replays.reference.gradients)
        self._has_loss = bool(replays.reference.losses)

    def change(self, differences: Differences) -> Change:
        """Return a Change, with the parameter and the column that changed most in units of their noise."""
        found, wholes = differences
        ratios = list(map(_ratio, found, self._noise))
        most = [float(each.max(initial=-1.0)) for each in ratios]
        worst = [int(np.argmax(each)) if each.size else 0 for each in ratios]
        gradient, parameter = (float(found[1][worst[1]]), self._names[worst[1]]) if self._names else (None, "")
        output, number, column = 0.0, 0, 0
        at = max(range(2, len(found)), key=most.__getitem__, default=0)
        if at and found[at].size:
            output, number, column = float(found[at][worst[at]]), at - 2, worst[at]
        loss = float(found[0][0]) if self._has_loss else None
        limit = max(each / most for each, most in zip(wholes, LIMITS))
        return Change(loss, gradient, parameter, output, number, column, max(most), limit)


def _key(graph: ReplayedGraph, inputs: Mapping[str, NDArray]) -> tuple:
    return (graph.number, *(array.shape for array in inputs.values()))


def _outputs(symbol: mx.sym.Symbol, values: Mapping[str, NDArray]) -> list[NDArray]:
    out = mx.nd.CachedOp(symbol)(*(values[name] for name in symbol.list_inputs()))
    return [out] if isinstance(out, NDArray) else list(out)


def _ratio(change: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Return ``change / noise``; inf where the change is, 0 where only the noise is."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(change), math.inf, change / noise)


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
