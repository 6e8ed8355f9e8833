"""The deciding: which graphs are tried, which are right enough, and which of those is the fastest."""

from __future__ import annotations

import statistics
from typing import Any, Callable, Collection, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from ..precision.graph import Graph, Node
from ..tuning.search import quartiles
from .calibration import sqnr
from .folding import Params, fold_constants, fold_norms, without_identities
from .fusing import fuse
from .lowering import lower
from .quantizing import QUANTIZED, Ranges, quantize, tensors_to_calibrate
from .report import Candidate, InferenceReport, Layer
from .runner import CandidateError, Runner

__all__ = ["BFLOAT16", "INT8", "Found", "Limits", "Search"]

INT8, BFLOAT16 = "int8", "bfloat16"
PLAIN, FOLDED, FUSED = "float32", "float32, folded", "float32, fused"
# FP32 whose terms are added in another order stays above this; a wrong fusion does not.
_SAME = 90.0
_FEWEST_ROUNDS, _MOST_ROUNDS, _SECONDS = 7, 31, 30.0
_CRASHES = 2  # of one operator, after which none of its kind is tried


class Limits(NamedTuple):
    """When a graph is right enough: ``evaluate`` loses no more than ``max_drop``; without it, see ``Search.judge``."""

    max_drop: float
    min_sqnr: float
    evaluate: Callable[[Graph, Params], float] | None


class Found(NamedTuple):
    """The graph to serve, with its parameters."""

    graph: Graph
    params: Params
    report: InferenceReport


class _Tried(NamedTuple):
    graph: Graph
    params: Params
    why: Mapping[str, str]  # by operator


class Search:
    """One search. ``calibrating``, ``held``: numbers of the runner's batches. ``tell`` is called with each part."""

    def __init__(
        self,
        graph: Graph,
        params: Params,
        runner: Runner,
        calibrating: Sequence[int],
        held: Sequence[int],
        limits: Limits,
        tell: Callable[[str], None],
    ) -> None:
        self._runner, self._calibrating, self._held = runner, list(calibrating), list(held)
        self._limits, self._tell = limits, tell
        self._original = without_identities(graph), params
        self._base = self._original
        self._tried: dict[str, _Tried] = {}
        self._rows: dict[str, Candidate] = {}
        self._alone: dict[str, float] = {}
        self._calibrators: dict[str, float] = {}
        self._score: float | None = None
        self._low = False  # whether bfloat16 is what INT8 falls back to
        self.notes: list[str] = []

    def run(self, dtypes: Collection[str]) -> Found:
        """Return the fastest graph of those that are right; FP32 where no other is faster beyond the spread."""
        self._full()
        if BFLOAT16 in dtypes:
            self._bfloat16()
        if INT8 in dtypes:
            self._int8()
        return self._choose()

    # -- FP32 ---------------------------------------------------------------------------------------

    def _full(self) -> None:
        self._tell("float32")
        graph, params = self._original
        self._tried[PLAIN] = _Tried(graph, params, {})
        self._runner.add(PLAIN, graph, params)
        every = sorted({*self._calibrating, *self._held})
        self._reference = dict(zip(every, self._outputs(PLAIN, every)))
        if any(np.isnan(value).any() for outputs in self._reference.values() for value in outputs):
            raise ValueError("the network's own FP32 outputs on the calibration data hold NaN: is it trained?")
        self._rows[PLAIN] = Candidate(PLAIN, sqnr=np.inf)
        folded = fold_constants(*fold_norms(graph, params))
        if self._same(FOLDED, fuse(folded[0], apart=True), folded[1]):
            self._base = folded
        else:
            self.notes.append("BatchNorm stays: folding it changes these outputs")
            self._same(FOLDED, fuse(graph, apart=True), params)
        if not self._same(FUSED, fuse(self._base[0]), self._base[1]):
            self.notes.append("MXNet's fusion is wrong on this network beyond what is known: it stays unfused")
        if self._limits.evaluate is not None:
            self._score = self._limits.evaluate(*self._tried[FOLDED][:2])

    def _same(self, name: str, graph: Graph, params: Params) -> bool:
        """Try an FP32 graph; return whether its outputs are those of the network, on all batches."""
        self._tried[name] = _Tried(graph, params, {})
        self._runner.add(name, graph, params)
        try:
            found = dict(zip(self._reference, self._outputs(name, list(self._reference))))
        except CandidateError as error:
            self._rows[name] = Candidate(name, verdict=f"fails here: {error}")
            return False
        worst, agreement = self._compared(found)
        verdict = "" if worst >= _SAME else f"not the network's outputs: below {_SAME:.0f} dB"
        self._rows[name] = Candidate(name, sqnr=worst, agreement=agreement, verdict=verdict)
        return not verdict

    # -- bfloat16 -----------------------------------------------------------------------------------

    def _bfloat16(self) -> None:
        self._tell(BFLOAT16)

        def build(full: Collection[str]) -> tuple[Graph, Params, list[str]]:
            graph, params = lower(*self._base, full)
            return graph, params, _low_layers(graph)

        try:
            _, _, layers = build(())
        except (mx.MXNetError, ValueError) as error:
            self.notes.append(f"bfloat16 cannot be had: {error}")
            return
        if not layers:
            self.notes.append("bfloat16: no operator of this network may compute in it")
            return
        self._fall_back(BFLOAT16, layers, build, "float32", rank=False)
        self._low = any(name.startswith(BFLOAT16) and not row.verdict for name, row in self._rows.items())

    # -- INT8 ---------------------------------------------------------------------------------------

    def _int8(self) -> None:
        self._tell("calibration")
        base, params = self._base
        fused = fuse(base, quantizable=True)
        self._runner.add("calibration", fused, params)
        try:
            tensors = tensors_to_calibrate(fused, params)
            ranges = self._runner.ranges("calibration", self._calibrating, tensors)
        except CandidateError as error:
            self.notes.append(f"int8 cannot be had: {error}")
            return
        every = quantize(fused, params, ranges["min/max"], ())[2]
        if not every:
            self.notes.append("int8: nothing to quantize, no operator of this network has an INT8 kernel")
            return
        failing = self._rank(every, lambda rest: quantize(fused, params, ranges["min/max"], rest, every=True))
        layers = [name for name in every if name not in failing]
        found = self._calibrator(fused, params, ranges, failing)
        if found is None:
            self.notes.append("int8: no graph runs here, see the reasons of its operators")
            return

        def build(rest: Collection[str], low: bool) -> tuple[Graph, Params, list[str]]:
            if not low:
                return quantize(fused, params, found, {*rest, *failing})
            operators = {node.name for node in base.nodes() if not node.is_variable}
            lowered, values = lower(base, params, operators - set(rest), quantizable=True)
            more = {f"{node.name}_output": found[_source(node)] for node in lowered.nodes() if _source(node) in found}
            return quantize(lowered, values, {**found, **more}, {*rest, *failing})

        kept = self._fall_back(INT8, layers, lambda rest: build(rest, False), "float32", why=failing)
        if kept and self._low:
            self._try(_named(INT8, len(kept), BFLOAT16), lambda: build(kept, True), dict.fromkeys(kept, "for accuracy"))

    def _calibrator(
        self, fused: Graph, params: Params, ranges: Mapping[str, Ranges], failing: Mapping[str, str]
    ) -> Any:
        """Return the ranges by the calibrator with the best SQNR on data that calibrated nothing; None: all fail."""
        self._tell("calibrators")
        for name, found in ranges.items():
            try:
                self._runner.add("trial", *quantize(fused, params, found, failing)[:2])
                outputs = self._outputs("trial", self._held)
            except (CandidateError, mx.MXNetError) as error:
                self.notes.append(f"int8 by {name} fails here: {_last(error)}")
                continue
            finally:
                self._runner.forget("trial")
            self._calibrators[name] = self._compared(dict(zip(self._held, outputs)))[0]
        return ranges[max(self._calibrators, key=self._calibrators.__getitem__)] if self._calibrators else None

    # -- falling back -------------------------------------------------------------------------------

    def _rank(self, layers: Sequence[str], build: Callable[[Collection[str]], tuple]) -> dict[str, str]:
        """Measure each layer alone in low precision, on one batch; return why some cannot run."""
        failing: dict[str, str] = {}
        crashes: dict[str, int] = {}
        kinds = {node.name: node.op for node in fuse(self._base[0], quantizable=True).nodes()}
        for number, name in enumerate(layers):
            self._tell(f"layer {number + 1} of {len(layers)}")
            kind = kinds.get(name, "")
            if crashes.get(kind, 0) >= _CRASHES:
                failing[name] = f"{kind} ended its process {_CRASHES} times"
                continue
            try:
                graph, params, _ = build([other for other in layers if other != name])
                self._runner.add("alone", graph, params)
                outputs = self._outputs("alone", self._held[:1])
                self._alone[name] = self._compared({self._held[0]: outputs[0]})[0]
            except (CandidateError, mx.MXNetError) as error:
                failing[name] = f"fails here: {_last(error)}"
                if isinstance(error, CandidateError) and error.crashed:
                    crashes[kind] = crashes.get(kind, 0) + 1
            finally:
                self._runner.forget("alone")
        return failing

    def _fall_back(
        self,
        dtype: str,
        layers: Sequence[str],
        build: Callable[[Collection[str]], tuple],
        other: str,
        *,
        rank: bool = True,
        why: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Find how few of the layers must leave ``dtype`` for the outputs to be right enough; return those layers.

        The first to leave are those that hurt most alone.
        """
        tried: dict[int, bool] = {}
        order = sorted(layers, key=lambda name: self._alone.get(name, np.inf))

        def within(count: int) -> bool:
            if count not in tried:
                self._tell(f"{dtype}, {count} of {len(layers)} layers not")
                reasons = {**(why or {}), **dict.fromkeys(order[:count], "for accuracy")}
                tried[count] = self._try(_named(dtype, count, other), lambda: build(order[:count]), reasons)
            return tried[count]

        if within(0):
            return []
        if not rank:
            self._alone.clear()
            self._rank(layers, build)
            order = sorted(layers, key=lambda name: self._alone.get(name, -np.inf))
        most = len(layers) - 1
        count, failed = min(1, most), 0
        while count < most and not within(count):
            count, failed = min(2 * count, most), count
        if not most or not within(count):
            self.notes.append(f"{dtype}: no graph with a layer in it stays within max_drop")
            return []
        while count - failed > 1:
            middle = (count + failed) // 2
            count, failed = (middle, failed) if within(middle) else (count, middle)
        return order[:count]

    def _try(self, name: str, build: Callable[[], tuple], why: Mapping[str, str]) -> bool:
        """Run a candidate on the held data; return whether it is right enough."""
        try:
            graph, params, _ = build()
            self._runner.add(name, graph, params)
            outputs = self._outputs(name, self._held)
        except (CandidateError, mx.MXNetError) as error:
            self._rows[name] = Candidate(name, verdict=f"fails here: {_last(error)}")
            return False
        self._tried[name] = _Tried(graph, params, why)
        self._rows[name] = row = self.judge(name, dict(zip(self._held, outputs)))
        return not row.verdict

    def judge(self, name: str, outputs: Mapping[int, Sequence[np.ndarray]]) -> Candidate:
        """Return how close a candidate comes, with the reason where that is not enough.

        By ``evaluate`` where there is one; else the SQNR must reach ``min_sqnr``, and no more than ``max_drop`` of the
        top answers may be others than FP32's.
        """
        limits = self._limits
        worst, agreement = self._compared(outputs)
        score, verdict = None, ""
        if limits.evaluate is not None and self._score is not None:
            score = limits.evaluate(*self._tried[name][:2])
            if not self._score - score <= limits.max_drop:
                verdict = f"loses {self._score - score:.4g}"
        elif worst < limits.min_sqnr:
            verdict = f"below {limits.min_sqnr:.0f} dB"
        elif agreement is not None and agreement < 1 - limits.max_drop:
            verdict = f"{1 - agreement:.1%} of the answers are others"
        return Candidate(name, sqnr=worst, agreement=agreement, score=score, verdict=verdict)

    def _outputs(self, name: str, batches: Sequence[int]) -> list[list[np.ndarray]]:
        return self._runner.outputs(name, batches)

    def _compared(self, found: Mapping[int, Sequence[np.ndarray]]) -> tuple[float, float | None]:
        """Return the worst output's SQNR, and the share of equal top answers of the first, where it has scores."""
        ratios, same = [], []
        for place in range(len(next(iter(found.values())))):
            pairs = [(self._reference[number][place], outputs[place]) for number, outputs in found.items()]
            wanted, got = (np.concatenate([each.reshape(-1) for each in side]) for side in zip(*pairs))
            ratios.append(sqnr(wanted, got))
            if place == 0 and pairs[0][0].ndim == 2 and pairs[0][0].shape[1] > 1:
                same = [np.argmax(want, 1) == np.argmax(value, 1) for want, value in pairs]
        return min(ratios), float(np.concatenate(same).mean()) if same else None

    # -- choosing -----------------------------------------------------------------------------------

    def _choose(self) -> Found:
        self._tell("whole graphs")
        names = [name for name, row in self._rows.items() if not row.verdict]
        times = self._runner.times(names, 2)
        spent = sum(min(each) for each in times.values())
        times = self._runner.times(names, int(np.clip(_SECONDS / spent, _FEWEST_ROUNDS, _MOST_ROUNDS)))
        middle = {name: statistics.median(each) for name, each in times.items()}
        full = [name for name in (PLAIN, FOLDED, FUSED) if name in names]
        baseline = min(full, key=middle.__getitem__)
        gains = {n: quartiles([a / b for a, b in zip(times[baseline], each)]) for n, each in times.items()}
        others = [name for name in names if name not in full]
        chosen = min(others, key=middle.__getitem__) if others else baseline
        if chosen not in full and gains[chosen][0] <= 1:
            chosen = baseline
        if chosen == PLAIN:  # as it is, MXNet would fuse it where a Module binds it, and perhaps wrongly
            chosen = min([name for name in full if name != PLAIN] or [PLAIN], key=middle.__getitem__)
        for dtype in (BFLOAT16, INT8):
            best = max((gains[n][1] for n in others if n.startswith(dtype)), default=None)
            if best is not None and best <= 1:
                self.notes.append(f"{dtype} does not pay here: {best:.2f} times as fast as {baseline}")
        rows = [
            row._replace(milliseconds=1e3 * middle[name], gain=gains[name]) if name in middle else row
            for name, row in self._rows.items()
        ]
        graph, params, _ = self._tried[chosen]
        report = InferenceReport(chosen, baseline, rows, self._layers(chosen), dict(self._calibrators), self.notes)
        return Found(graph, params, report)

    def _layers(self, name: str) -> list[Layer]:
        graph, _, why = self._tried[name]
        spent = self._runner.profile(name)
        layers = []
        for node in graph.nodes():
            if node.is_variable:
                continue
            own = node.name[len(QUANTIZED) :] if node.name.startswith(QUANTIZED) else node.name
            milliseconds, dtype = spent.get(f"{node.name}_output", (None, "float32"))
            dtype = INT8 if own != node.name or dtype == "uint8" else dtype
            reason = why.get(own) or ("" if dtype == "float32" else "within the accuracy that was requested")
            layers.append(Layer(own, node.op, dtype, reason, self._alone.get(own), milliseconds))
        return layers


def _low_layers(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes() if node.op.startswith("_sg_mkldnn") and _reads_low(node)]


def _reads_low(node: Node) -> bool:
    weight = node.inputs[1].node if len(node.inputs) > 1 else None
    return weight is not None and weight.is_variable and weight.attrs.get("__dtype__") == "12"


def _source(node: Node) -> str:
    """Return the tensor that a cast reads, by its name in the ranges; an empty string for what is no cast."""
    return f"{node.inputs[0].node.name}_output" if node.op == "amp_cast" else ""


def _named(dtype: str, count: int, other: str) -> str:
    return f"{dtype}, {count} in {other}" if count else dtype


def _last(error: Exception) -> str:
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)[-200:]
