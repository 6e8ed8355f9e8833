"""The search of ``optimize_for_inference``: which graphs are tried, and which accurate one is the fastest.

FP32 is tried as it is, folded and fused; then each dtype in all layers. Where that is not accurate enough, the layers
that cost most accuracy, when they alone are in the dtype, go to FP32 first, as few as are needed (``_fall_back``).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Callable, Collection, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from ..host.callbacks import last_line
from ..precision.graph import TYPE_CODES, Graph, Node
from ..precision.plan import Decision
from ..serving.folding import Params, folded_norms, without_identities
from ..serving.fusing import fuse, inner_operators
from ..serving.lowering import lower, lower_to_float16
from ..serving.sums import register
from ..tuning.clock import beats, gain
from .calibration import CALIBRATORS, Statistics, column_axis, column_sqnr, columns_of, same_answers, sqnr
from .quantizing import QUANTIZED, Ranges, layers_at, quantizable, quantize, tensor_names, tensors_to_calibrate
from .report import Candidate, InferenceReport, Layer
from .runner import CandidateError, Runner
from .targets import Subject

INT8, BFLOAT16, FLOAT16, FLOAT32 = "int8", "bfloat16", "float16", "float32"
SUMS = "float16 sums"
PLAIN, FOLDED, FUSED = "float32", "float32, folded", "float32, fused"
# The SQNR in dB above which two FP32 graphs compute the same. Sums in another order stay above it, and a wrong fusion
# does not.
_SAME = 90.0
# How many rounds are timed: at least, at most, and in between as many as take so many seconds.
_FEWEST_ROUNDS, _MOST_ROUNDS, _SECONDS = 7, 31, 30.0
_FAILURES = CandidateError, mx.MXNetError
# A dtype in which a network of more layers than this is less than so many times as fast is not tried layer by layer.
_FEW, _SLOW = 16, 0.95
# So many layers are named in a note.
_NAMED = 3
_ALL_FP32 = "the graph that is served is FP32"
# What gives the scores of an output with three axes or more, and what may come after it.
_SCORES = {"Convolution", "Deconvolution", "FullyConnected", "batch_dot", "dot", "log_softmax", "sigmoid", "softmax"}
_SCORES |= {"SoftmaxActivation", "SoftmaxOutput"}
_AFTER_SCORES = {"BilinearSampler", "BlockGrad", "Concat", "Flatten", "Reshape", "SwapAxis", "UpSampling", "_copy"}
_AFTER_SCORES |= {"_contrib_BilinearResize2D", "_plus_scalar", "_mul_scalar", "_div_scalar", "broadcast_add"}
_AFTER_SCORES |= {"expand_dims", "elemwise_add", "slice", "slice_axis", "slice_like", "squeeze", "transpose"}
# After so many crashes of one type of operator in INT8, others of the type are not run any more.
_CRASHES = 2


class Made(NamedTuple):
    """A graph, and its parameters by name."""

    graph: Graph
    params: Params

    def fused(self, **how: bool) -> Made:
        """Return it with operators fused, as ``fuse`` takes it."""
        return Made(fuse(self.graph, **how), self.params)


# Takes the names of the layers that must not be in the dtype that is tried.
Build = Callable[[Collection[str]], Made]


class Limits(NamedTuple):
    """Limits of accuracy, as of ``optimize_for_inference``; ``evaluate`` takes a graph and its parameters."""

    max_drop: float
    min_sqnr: float
    evaluate: Callable[[Graph, Params], float] | None


@dataclass
class Tried:
    """A candidate: its row in the report, and what the search knows of it besides."""

    row: Candidate
    # Of its layers but those that are kept in another; FLOAT32 without any in low precision.
    dtype: str
    # None where MXNet cannot make or run it.
    made: Made | None = None
    # The reasons for the dtypes of operators, by name.
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Return whether it may be returned: it runs, and is accurate enough."""
        return not self.row.verdict


@dataclass(frozen=True)
class Quantizer:
    """Makes INT8 graphs of one network in FP32, with BatchNorm folded."""

    base: Made
    # ``base`` fused, as MXNet quantizes it.
    fused: Graph
    ranges: Ranges
    # The operators that cannot be in INT8, with the reason, which the search finds more of.
    failing: dict[str, str]
    # What only MXNet's full mode would quantize, and may fail.
    others: Collection[str]

    def graph(self, rest: Collection[str] = ()) -> Made:
        """Return the graph with all layers in INT8 but ``rest`` and those that fail."""
        return self._made(self.fused, self.base.params, self.ranges, {*rest, *self.failing})

    def alone(self, rest: Collection[str]) -> Made:
        """Return the graph with just those layers in INT8 that are not in ``rest``, without a neighbor in INT8 too."""
        return self._made(self.fused, self.base.params, self.ranges, {*rest, *self.others}, every=True)

    def together(self, rest: Collection[str]) -> Made:
        return self.alone([*self.failing, *rest])

    def beside_bfloat16(self, rest: Collection[str]) -> Made:
        """Return ``graph(rest)`` with ``rest`` in bfloat16."""
        groups = {node.name: inner_operators(node) for node in self.fused.nodes() if not node.is_variable}
        full = {name for layer, names in groups.items() if layer not in rest for name in names}
        lowered, params = lower(*self.base, full, quantizable=True)
        # A cast has the range of the tensor that it casts.
        casts = [node for node in lowered.nodes() if node.op == "amp_cast"]
        read = {f"{cast.name}_output": tensor_names(cast.inputs)[0] for cast in casts}
        more = {name: self.ranges[source] for name, source in read.items() if source in self.ranges}
        return self._made(lowered, params, {**self.ranges, **more}, {*rest, *self.failing})

    @staticmethod
    def _made(*args: Any, **kwargs: Any) -> Made:
        return Made(*quantize(*args, **kwargs)[:2])


class CandidateSearch:
    """One search. Each graph that is tried is a candidate, with a name such as ``"int8, 3 in float32"``."""

    def __init__(self, subject: Subject, runner: Runner, limits: Limits, tell: Callable[[str], None]) -> None:
        self._runner, self._limits, self._tell = runner, limits, tell
        self._calibrating, self._held = subject.calibrating, subject.held
        self._base = Made(subject.graph, subject.params)
        self._tried: dict[str, Tried] = {}  # by the candidate's name
        self._alone: dict[str, dict[str, float]] = {}  # by dtype, then by layer
        self._calibrators: dict[str, float] = {}
        self.notes: list[str] = []
        if set(self._held) & set(self._calibrating):
            self.notes.append("one batch both calibrated and measured: SQNR is that of data that was seen")

    def run(self, dtypes: Collection[str]) -> tuple[Graph, Params, InferenceReport]:
        """Return the fastest graph within the ``Limits``; ``CandidateError`` if the network fails in FP32.
        A float16 graph is for a GPU: nothing is timed, and the one with the most layers in float16 is returned."""
        self._try_float32(fused=FLOAT16 not in dtypes)
        if FLOAT16 in dtypes:
            return self._find_float16()
        if BFLOAT16 in dtypes:
            self._try_bfloat16()
        if INT8 in dtypes:
            self._try_int8()
        return self._choose()

    # -- FP32 ---------------------------------------------------------------------------------------

    def _try_float32(self, fused: bool) -> None:
        """Run the network as it is, with BatchNorm folded and, with ``fused``, fused by oneDNN too."""
        self._tell("float32")
        plain = self._base = Made(without_identities(self._base.graph), self._base.params)
        folded = Made(*folded_norms(*plain))
        every = sorted({*self._calibrating, *self._held})
        self._reference = self._outputs(PLAIN, plain, every)
        if any(np.isnan(value).any() for outputs in self._reference.values() for value in outputs):
            raise ValueError("the network's own FP32 outputs on the calibration data hold NaN: is it trained?")
        self._tried[PLAIN] = Tried(Candidate(PLAIN, sqnr=np.inf, column_sqnr=np.inf), FLOAT32, plain)
        if self._try_same(FOLDED, partial(folded.fused, apart=True)):
            self._base = folded  # graphs in other dtypes are made from it
        else:
            self.notes.append(f"BatchNorm stays: the graph without it {self._tried[FOLDED].row.verdict}")
            self._try_same(FOLDED, partial(plain.fused, apart=True))
        if fused and not self._try_same(FUSED, self._base.fused):
            self.notes.append(f"the network stays unfused: the fused graph {self._tried[FUSED].row.verdict}")
        # Of those without fused operators, which may run in the user's process; one with a verdict may crash.
        self._unfused = FOLDED if self._tried[FOLDED].fits else PLAIN
        if self._limits.evaluate is not None:  # scores in other dtypes are compared with this one
            unfused = self._tried[self._unfused]
            self._score = self._limits.evaluate(*(unfused.made or plain))
            unfused.row = unfused.row._replace(score=self._score)

    # -- bfloat16 -----------------------------------------------------------------------------------

    def _try_bfloat16(self) -> None:
        self._tell(BFLOAT16)
        try:
            layers = _bfloat16_layers(self._in_bfloat16(()).graph)
        except (mx.MXNetError, ValueError) as error:
            self.notes.append(f"bfloat16 cannot be had: {error}")
            return
        if layers:
            self._fall_back(BFLOAT16, layers, self._in_bfloat16)
        else:
            self.notes.append("bfloat16: no operator of this network may compute in it")

    def _in_bfloat16(self, full: Collection[str]) -> Made:
        return Made(*lower(*self._base, full))

    # -- float16 ------------------------------------------------------------------------------------

    def _find_float16(self) -> tuple[Graph, Params, InferenceReport]:
        """Return the float16 graph with as few layers in FP32 as accuracy needs, or else the FP32 graph."""
        self._tell(FLOAT16)
        self.notes.append("float16 was emulated on this CPU to see its accuracy; no time was measured")
        graph, params = self._base
        found = lower_to_float16(graph, params, (), "gpu")
        decisions = found[2]
        weighted = [node for node in graph.nodes() if any(entry.node.name in params for entry in node.inputs)]
        layers = [node.name for node in weighted if decisions[node.name].low]
        kept: list[str] = []
        if layers:
            kept = self._fall_back(FLOAT16, layers, self._in_float16)
        else:
            self.notes.append("float16: no layer of this network may compute in it")
        chosen = _candidate_name(FLOAT16, len(kept))
        if chosen in self._tried and self._tried[chosen].fits:
            graph, params, decisions = lower_to_float16(graph, params, kept, "gpu") if kept else found
            names = self._base.graph.names()
            if any(node.op == "FullyConnected" and decisions[name].low for node, name in names.items()):
                self._try_float16_sums(kept)
        else:
            chosen, decisions = self._unfused, {}
        operators, alone = [], self._alone.get(FLOAT16, {})
        for node in self._base.graph.nodes():
            if not node.is_variable:
                decision = decisions.get(node.name, Decision(node.op, False, ""))
                dtype = FLOAT16 if decision.low else FLOAT32
                operators.append(Layer(node.name, node.op, dtype, decision.reason or _ALL_FP32, alone.get(node.name)))
        rows = [each.row for each in self._tried.values()]
        return graph, params, InferenceReport(chosen, self._unfused, rows, operators, {}, self.notes)

    def _in_float16(self, full: Collection[str], float16_sums: bool = False) -> Made:
        return Made(*lower_to_float16(*self._base, full, "cpu", float16_sums=float16_sums)[:2])

    def _try_float16_sums(self, kept: Collection[str]) -> None:
        """Run one more candidate, which emulates a GPU with MXNET_FC_TRUE_FP16=1, and note the result."""
        register()
        right = self._try(SUMS, FLOAT16, partial(self._in_float16, kept, float16_sums=True))
        self.notes.append(
            f"MXNET_FC_TRUE_FP16=1, which lets FullyConnected sum in float16 on a GPU, is {'' if right else 'not '}"
            f"accurate enough here: see {SUMS!r}"
        )

    # -- INT8 ---------------------------------------------------------------------------------------

    def _try_int8(self) -> None:
        """Try INT8, with as few layers in FP32 as accuracy needs.
        If there are any, and a bfloat16 graph was accurate enough, try these layers in bfloat16 too."""
        self._tell("calibration")
        try:
            seen, int8, every = self._calibrated()
        except _FAILURES as error:
            self.notes.append(f"int8 cannot be had: {last_line(error)[-350:]}")
            return
        if not every:
            self.notes.append("int8: nothing to quantize, no operator of this network has an INT8 kernel")
            return
        failing = int8.failing
        if len(every) > _FEW and self._is_slow(INT8, int8.graph()):
            self._try(INT8, INT8, int8.graph, failing)
            return
        failing.update(self._measure_alone(INT8, every, int8.alone))
        failing.update(self._fails_with_others([name for name in every if name not in failing], int8.together))
        layers = [name for name in every if name not in failing]
        found = self._best_ranges(int8, seen)
        if found is None:
            self.notes.append("int8: no graph runs here, see the reasons of its operators")
            return
        int8 = replace(int8, ranges=found)
        kept = self._fall_back(INT8, layers, int8.graph, why=failing)
        if kept and any(each.dtype == BFLOAT16 and each.fits for each in self._tried.values()):
            name = _candidate_name(INT8, len(kept), BFLOAT16)
            self._try(name, INT8, partial(int8.beside_bfloat16, kept), dict.fromkeys(kept, "for accuracy"))

    def _calibrated(self) -> tuple[Statistics, Quantizer, list[str]]:
        """Return what calibration has seen, a Quantizer with the ranges of all values, and all layers for INT8."""
        fused, params = self._base.fused(quantizable=True)
        self._runner.add("calibration", fused, params)
        tensors = tensors_to_calibrate(fused, params)
        seen: Statistics = self._runner.ask("statistics", "calibration", self._calibrating, tensors)
        failing = layers_at(fused, seen.unusable(tensors))
        ranges = seen.ranges("min/max")
        every = quantize(fused, params, ranges, failing)[2]
        others = {*failing, *quantizable(fused, params, failing, every=True)} - {*every}
        self._note_unfit({name: failing[name] for name in quantizable(fused, params, ()) if name in failing})
        return seen, Quantizer(self._base, fused, ranges, failing, others), every

    def _note_unfit(self, layers: Mapping[str, str]) -> None:
        if layers:
            named = "; ".join(f"{name!r}, as {why}" for name, why in list(layers.items())[:_NAMED])
            more = f"; and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
            self.notes.append(f"int8: the range of some values is not known, so these stay out: {named}{more}")

    def _is_slow(self, dtype: str, made: Made) -> bool:
        """Return whether a graph with all layers in ``dtype`` is slower than FP32, and note it; False if it fails."""
        full = self._full_candidates()
        try:
            self._runner.add("trial", *made)
            times = self._runner.ask("times", [*full, "trial"], _FEWEST_ROUNDS)
        except _FAILURES:
            return False
        best = min(full, key=lambda name: statistics.median(times[name]))
        speed = gain(times, "trial", best)[1]
        if speed < _SLOW:
            self.notes.append(f"{dtype}: its layers were not tried one by one: all in it are {speed:.2f} times as fast")
        return speed < _SLOW

    def _full_candidates(self) -> list[str]:
        return [name for name, each in self._tried.items() if each.dtype == FLOAT32 and each.fits]

    def _best_ranges(self, int8: Quantizer, seen: Statistics) -> Ranges | None:
        """Return the ranges with which INT8 has the highest SQNR, which is kept; None if it cannot run with any."""
        self._tell("calibrators")
        ranges: dict[str, Ranges] = {}
        for name in CALIBRATORS:
            try:
                ranges[name] = self._runner.ask("ranges", seen, name)
                self._calibrators[name] = self._sqnr_of(replace(int8, ranges=ranges[name]).graph(), self._held)
            except _FAILURES as error:
                self.notes.append(f"int8 by {name} {_fails(error)}")
        return ranges[max(self._calibrators, key=self._calibrators.__getitem__)] if self._calibrators else None

    # -- falling back -------------------------------------------------------------------------------

    def _measure_alone(self, dtype: str, layers: Sequence[str], build: Build) -> dict[str, str]:
        """Keep, by layer, the worst SQNR in dB if this layer alone is in ``dtype``, on one batch.
        Return the layers that cannot run in ``dtype``, with the reason."""
        alone = self._alone[dtype] = {}
        failing: dict[str, str] = {}
        crashes: dict[str, int] = {}
        kinds = {node.name: node.op for node in self._base.fused(quantizable=True).graph.nodes()}
        for number, name in enumerate(layers):
            self._tell(f"layer {number + 1} of {len(layers)}")
            kind = kinds.get(name, "")
            if crashes.get(kind, 0) >= _CRASHES:
                failing[name] = f"{kind} ended its process {_CRASHES} times"
                continue
            try:
                alone[name] = self._sqnr_of(build([other for other in layers if other != name]), self._held[:1])
            except _FAILURES as error:
                failing[name] = _fails(error)
                if isinstance(error, CandidateError) and error.crashed:
                    crashes[kind] = crashes.get(kind, 0) + 1
        return failing

    def _fails_with_others(self, layers: Sequence[str], build: Build) -> dict[str, str]:
        """Return the layer, with the reason, without which the others run together; none if all do, or no one is it."""
        reason = ""
        for name in ("", *reversed(layers)):  # what is stored otherwise for a layer comes from those before it
            try:
                self._sqnr_of(build([name] if name else []), self._held[:1])
            except _FAILURES as error:
                reason = reason or _fails(error)
                continue
            return {name: reason} if name else {}
        return {}

    def _sqnr_of(self, made: Made, batches: Sequence[int]) -> float:
        """Run a graph that is no candidate; return the SQNR in dB of its worst column."""
        return self._compared(self._outputs("trial", made, batches))[1]

    def _outputs(self, name: str, made: Made, batches: Sequence[int]) -> dict[int, list[np.ndarray]]:
        self._runner.add(name, *made)
        return dict(zip(batches, self._runner.ask("outputs", name, batches)))

    def _fall_back(
        self, dtype: str, layers: Sequence[str], build: Build, why: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the layers, as few as accuracy needs, that must be in FP32; ``why`` has reasons for other operators.
        The list is empty if the candidate ``dtype`` has no verdict, or if ``dtype`` is given up, as a note says."""
        tried: dict[int, bool] = {}
        order = self._by_cost(dtype, layers)

        def within(count: int) -> bool:
            # It is run at the first call for this count.
            if count not in tried:
                self._tell(f"{dtype}, {count} of {len(layers)} layers not")
                reasons = {**(why or {}), **dict.fromkeys(order[:count], "for accuracy")}
                tried[count] = self._try(_candidate_name(dtype, count), dtype, partial(build, order[:count]), reasons)
            return tried[count]

        if within(0):
            return []
        whole = self._tried[dtype]
        if dtype == BFLOAT16 and len(layers) > _FEW and whole.made and self._is_slow(dtype, whole.made):
            return []
        if dtype not in self._alone:
            self._measure_alone(dtype, layers, build)
            order = self._by_cost(dtype, layers)
        most = len(layers) - 1
        count, failed = min(1, most), 0
        while count < most and not within(count):
            count, failed = min(2 * count, most), count
        if not most or not within(count):
            inaccurate = "no graph with a layer in it is accurate enough"
            self.notes.append(f"{dtype}: {inaccurate if whole.made else whole.row.verdict}")
            return []
        while count - failed > 1:
            middle = (count + failed) // 2
            count, failed = (middle, failed) if within(middle) else (count, middle)
        return order[:count]

    def _by_cost(self, dtype: str, layers: Sequence[str]) -> list[str]:
        """Return the layers in the order in which they go to FP32; as given, before ``_measure_alone``."""
        alone = self._alone.get(dtype, {})
        return sorted(layers, key=lambda name: alone.get(name, -np.inf))  # most costs one that cannot run

    def _try(self, name: str, dtype: str, build: Callable[[], Made], why: Mapping[str, str] | None = None) -> bool:
        """Run a candidate; return whether it is within the ``Limits``. ``why`` has reasons for dtypes, by operator."""
        tried = self._run(name, dtype, build, self._held, why)
        if tried.made:
            limits, row, score, verdict = self._limits, tried.row, None, ""
            if limits.evaluate is not None:
                score = limits.evaluate(*tried.made)
                verdict = "" if self._score - score <= limits.max_drop else f"loses {self._score - score:.4g}"
            elif (row.column_sqnr or 0.0) < limits.min_sqnr:
                verdict = f"below {limits.min_sqnr:.0f} dB"
            elif row.agreement is not None and row.agreement < 1 - limits.max_drop:
                verdict = f"{1 - row.agreement:.1%} of the answers are others"
            tried.row = row._replace(score=score, verdict=verdict)
        return tried.fits

    def _try_same(self, name: str, build: Callable[[], Made]) -> bool:
        """Run an FP32 candidate; return whether its outputs are those of the network but for rounding."""
        tried = self._run(name, FLOAT32, build, list(self._reference))
        if tried.made and not (tried.row.sqnr or 0.0) >= _SAME:  # or NaN
            tried.row = tried.row._replace(verdict=f"has other outputs: below {_SAME:.0f} dB")
        return tried.fits

    def _run(
        self,
        name: str,
        dtype: str,
        build: Callable[[], Made],
        batches: Sequence[int],
        why: Mapping[str, str] | None = None,
    ) -> Tried:
        """Make and run a candidate; keep and return what it is, with a verdict if it fails."""
        try:
            made = build()
            ratio, worst, agreement = self._compared(self._outputs(name, made, batches))
        except _FAILURES as error:
            tried = Tried(Candidate(name, verdict=_fails(error)), dtype)
        else:
            row = Candidate(name, sqnr=ratio, column_sqnr=worst, agreement=agreement)
            tried = Tried(row, dtype, made, why or {})
        self._tried[name] = tried
        return tried

    def _compared(self, found: Mapping[int, Sequence[np.ndarray]]) -> tuple[float, float, float | None]:
        """Return how near outputs, by the position of a batch, are to FP32's: sqnr, column_sqnr and agreement."""
        pooled, worst, same = [], [], []
        for place, head in enumerate(self._base.graph.heads):
            pairs = [(self._reference[number][place], outputs[place]) for number, outputs in found.items()]
            pooled.append(sqnr(*(np.concatenate([each.reshape(-1) for each in side]) for side in zip(*pairs))))
            columns = [[columns_of(each) for each in side] for side in zip(*pairs)]
            if len({each.shape[1] for each in columns[0]}) > 1:  # of each batch another number
                columns = [[each.reshape(-1, 1) for each in side] for side in columns]
            wanted, got = map(np.concatenate, columns)
            worst.append(column_sqnr(wanted, got))
            axes = pairs[0][0].ndim
            if axes == 2 or (axes > 2 and _gives_scores(head.node, column_axis(axes))):
                same.append(same_answers(wanted, got))
        return min(pooled), min(worst), min((each for each in same if each is not None), default=None)

    # -- choosing -----------------------------------------------------------------------------------

    def _choose(self) -> tuple[Graph, Params, InferenceReport]:
        """Time the candidates that are accurate enough; return the fastest."""
        self._tell("whole graphs")
        names = [name for name, each in self._tried.items() if each.fits and self._runs_again(each)]
        spent = sum(min(each) for each in self._runner.ask("times", names, 2).values())
        times = self._runner.ask("times", names, int(np.clip(_SECONDS / spent, _FEWEST_ROUNDS, _MOST_ROUNDS)))
        middle = {name: statistics.median(each) for name, each in times.items()}
        full = self._full_candidates()
        others = [name for name in names if name not in full]
        baseline = min(full, key=middle.__getitem__)
        gains = {name: gain(times, name, baseline) for name in names}
        chosen = min(others, key=middle.__getitem__, default=baseline)
        if not beats(times, chosen, baseline):
            chosen = baseline
        if chosen == PLAIN:  # a Module that binds the plain graph would let MXNet fuse it, perhaps wrongly
            chosen = min([name for name in full if name != PLAIN] or [PLAIN], key=middle.__getitem__)
        for dtype in (BFLOAT16, INT8):
            best = max((gains[name][1] for name in others if self._tried[name].dtype == dtype), default=None)
            if best is not None and best <= 1:
                self.notes.append(f"{dtype} does not pay here: {best:.2f} times as fast as {baseline}")
        for name in names:
            tried = self._tried[name]
            tried.row = tried.row._replace(milliseconds=1e3 * middle[name], gain=gains[name])
        rows = [each.row for each in self._tried.values()]
        report = InferenceReport(chosen, baseline, rows, self._layers(chosen), self._calibrators, self.notes)
        return *(self._tried[chosen].made or self._base), report

    def _runs_again(self, tried: Tried) -> bool:
        """Return whether a candidate runs several times; that it fails is its verdict, but for the network itself."""
        try:
            self._runner.ask("times", [tried.row.name], 1)
        except CandidateError as error:
            if tried.row.name == PLAIN:
                raise
            tried.row = tried.row._replace(verdict=_fails(error))
        return tried.fits

    def _layers(self, name: str) -> list[Layer]:
        """Return a report's ``Layer`` of each operator of a candidate, which runs once more for the times."""
        tried = self._tried[name]
        spent = self._runner.ask("profile", name)
        layers, alone = [], self._alone.get(tried.dtype, {})
        in_fp32 = _ALL_FP32 if tried.dtype == FLOAT32 else f"no {tried.dtype} kernel is tried for it"
        for node in (tried.made or self._base).graph.nodes():
            if node.is_variable:
                continue
            own = node.name[len(QUANTIZED) :] if node.name.startswith(QUANTIZED) else node.name
            names = f"{node.name}_output", f"{node.name}_output0"  # MXNet numbers several outputs of most operators
            milliseconds, dtype = next((spent[name] for name in names if name in spent), (None, FLOAT32))
            dtype = INT8 if own != node.name or dtype == "uint8" else dtype
            reason = tried.why.get(own) or ("within the accuracy that was requested" if dtype != FLOAT32 else in_fp32)
            parts = tuple(inner_operators(node))
            layers.append(
                Layer(own, node.op, dtype, reason, alone.get(own), milliseconds, parts if len(parts) > 1 else ())
            )
        return layers


def _gives_scores(node: Node, axis: int) -> bool:
    """Return whether a layer, a product or a softmax gives an output, perhaps moved, scaled or shifted."""
    # Columns that come from several operators are no scores of one question.
    while node.op in _AFTER_SCORES and not (node.op == "Concat" and int(node.attrs.get("dim", "1")) == axis):
        node = node.inputs[0].node
    return node.op in _SCORES or (node.op == "Activation" and node.attrs["act_type"] == "sigmoid")


def _bfloat16_layers(graph: Graph) -> list[str]:
    """Return the names of the fused operators that compute in bfloat16: their weight is a bfloat16 array."""
    weights = {n.name: n.inputs[1].node for n in graph.nodes() if n.op.startswith("_sg_mkldnn") and len(n.inputs) > 1}
    code = TYPE_CODES[BFLOAT16]
    return [name for name, node in weights.items() if node.is_variable and node.attrs.get("__dtype__") == code]


def _candidate_name(dtype: str, count: int, other: str = FLOAT32) -> str:
    return f"{dtype}, {count} in {other}" if count else dtype


def _fails(error: Exception) -> str:
    return f"fails here: {last_line(error)[-350:]}"
