"""The search of ``optimize_for_inference``: which graphs are tried, and which accurate one is the fastest.

FP32 is tried as it is, folded and fused; then each dtype in all layers. Where that is not accurate enough, the layers
that cost most accuracy, when they alone are in the dtype, go to FP32 first, as few as are needed (``_fall_back``).
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Callable, Collection, Mapping, NamedTuple, Sequence, Tuple

import mxnet as mx
import numpy as np

from ..callbacks import last_line
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

INT8, BFLOAT16, FLOAT16 = "int8", "bfloat16", "float16"
SUMS = "float16 sums"
PLAIN, FOLDED, FUSED = "float32", "float32, folded", "float32, fused"
# The SQNR in dB above which two FP32 graphs compute the same. Sums in another order stay above it, and a wrong fusion
# does not.
_SAME = 90.0
# How many rounds are timed: at least, at most, and in between as many as take so many seconds.
_FEWEST_ROUNDS, _MOST_ROUNDS, _SECONDS = 7, 31, 30.0
# How the verdict on a graph begins that MXNet cannot run.
_FAILS = "fails here"
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


Made = Tuple[Graph, Params]
# Takes the names of the layers that must not be in the dtype that is tried.
Build = Callable[[Collection[str]], Made]


class Limits(NamedTuple):
    """Limits of accuracy, as of ``optimize_for_inference``; ``evaluate`` takes a graph and its parameters."""

    max_drop: float
    min_sqnr: float
    evaluate: Callable[[Graph, Params], float] | None


class CandidateSearch:
    """One search. Each graph that is tried is a candidate, with a name such as ``"int8, 3 in float32"``."""

    def __init__(self, subject: Subject, runner: Runner, limits: Limits, tell: Callable[[str], None]) -> None:
        self._runner, self._limits, self._tell = runner, limits, tell
        self._calibrating, self._held = subject.calibrating, subject.held
        self._base = subject.graph, subject.params
        # By candidate: the graph, its parameters by name, and the reasons for the dtypes of operators by name.
        self._tried: dict[str, tuple[Graph, Params, Mapping[str, str]]] = {}
        self._rows: dict[str, Candidate] = {}
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
        graph, params = self._base = without_identities(self._base[0]), self._base[1]
        folded = folded_norms(graph, params)
        every = sorted({*self._calibrating, *self._held})
        self._reference = self._outputs(PLAIN, self._base, every)
        if any(np.isnan(value).any() for outputs in self._reference.values() for value in outputs):
            raise ValueError("the network's own FP32 outputs on the calibration data hold NaN: is it trained?")
        self._tried[PLAIN] = *self._base, {}
        self._rows[PLAIN] = Candidate(PLAIN, sqnr=np.inf, column_sqnr=np.inf)
        if self._try(FOLDED, lambda: (fuse(folded[0], apart=True), folded[1]), {}, same=True):
            self._base = folded  # graphs in other dtypes are made from it
        else:
            self.notes.append(f"BatchNorm stays: the graph without it {self._rows[FOLDED].verdict}")
            self._try(FOLDED, lambda: (fuse(graph, apart=True), params), {}, same=True)
        if fused and not self._try(FUSED, lambda: (fuse(self._base[0]), self._base[1]), {}, same=True):
            self.notes.append(f"the network stays unfused: the fused graph {self._rows[FUSED].verdict}")
        # Of those without fused operators, which may run in the user's process; one with a verdict may crash.
        self._unfused = PLAIN if self._rows[FOLDED].verdict else FOLDED
        if self._limits.evaluate is not None:  # scores in other dtypes are compared with this one
            self._score = self._limits.evaluate(*self._tried[self._unfused][:2])
            self._rows[self._unfused] = self._rows[self._unfused]._replace(score=self._score)

    # -- bfloat16 -----------------------------------------------------------------------------------

    def _try_bfloat16(self) -> None:
        self._tell(BFLOAT16)
        build = partial(lower, *self._base)
        try:
            layers = _bfloat16_layers(build(())[0])
        except (mx.MXNetError, ValueError) as error:
            self.notes.append(f"bfloat16 cannot be had: {error}")
            return
        if layers:
            self._fall_back(BFLOAT16, layers, build)
        else:
            self.notes.append("bfloat16: no operator of this network may compute in it")

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
            kept = self._fall_back(FLOAT16, layers, lambda full: lower_to_float16(*self._base, full, "cpu")[:2])
        else:
            self.notes.append("float16: no layer of this network may compute in it")
        chosen = _candidate_name(FLOAT16, len(kept), "float32")
        if chosen in self._rows and not self._rows[chosen].verdict:
            graph, params, decisions = lower_to_float16(graph, params, kept, "gpu") if kept else found
            if any(node.op == "FullyConnected" and decisions[name].low for node, name in self._base[0].names().items()):
                self._try_float16_sums(kept)
        else:
            chosen, decisions = self._unfused, {}
        operators, alone = [], self._alone.get(FLOAT16, {})
        for node in self._base[0].nodes():
            if not node.is_variable:
                decision = decisions.get(node.name, Decision(node.op, False, ""))
                dtype = FLOAT16 if decision.low else "float32"
                operators.append(Layer(node.name, node.op, dtype, decision.reason or _ALL_FP32, alone.get(node.name)))
        rows = list(self._rows.values())
        return graph, params, InferenceReport(chosen, self._unfused, rows, operators, {}, self.notes)

    def _try_float16_sums(self, kept: Collection[str]) -> None:
        """Run one more candidate, which emulates a GPU with MXNET_FC_TRUE_FP16=1, and note the result."""
        register()
        right = self._try(SUMS, lambda: lower_to_float16(*self._base, kept, "cpu", float16_sums=True)[:2], {})
        self.notes.append(
            f"MXNET_FC_TRUE_FP16=1, which lets FullyConnected sum in float16 on a GPU, is {'' if right else 'not '}"
            f"accurate enough here: see {SUMS!r}"
        )

    # -- INT8 ---------------------------------------------------------------------------------------

    def _try_int8(self) -> None:
        """Try INT8, with as few layers in FP32 as accuracy needs.
        If there are any, and a bfloat16 graph was accurate enough, try these layers in bfloat16 too."""
        self._tell("calibration")
        base, params = self._base
        fused = fuse(base, quantizable=True)
        try:
            self._runner.add("calibration", fused, params)
            tensors = tensors_to_calibrate(fused, params)
            seen: Statistics = self._runner.ask("statistics", "calibration", self._calibrating, tensors)
            failing = layers_at(fused, seen.unusable(tensors))
            least = seen.ranges("min/max")
            every = quantize(fused, params, least, failing)[2]
            # What only MXNet's full mode would quantize is no candidate, and may fail.
            others = {*failing, *quantizable(fused, params, failing, every=True)} - {*every}
            self._note_unfit({name: failing[name] for name in quantizable(fused, params, ()) if name in failing})
        except _FAILURES as error:
            self.notes.append(f"int8 cannot be had: {last_line(error)[-350:]}")
            return
        if not every:
            self.notes.append("int8: nothing to quantize, no operator of this network has an INT8 kernel")
            return
        whole = lambda: quantize(fused, params, least, failing)[:2]  # noqa: E731
        if len(every) > _FEW and self._is_slow(INT8, whole):
            self._try(INT8, whole, failing)
            return
        one = lambda rest: quantize(fused, params, least, {*rest, *others}, every=True)[:2]  # noqa: E731
        failing.update(self._measure_alone(INT8, every, one))
        alone = [name for name in every if name not in failing]
        failing.update(self._fails_with_others(alone, lambda rest: one([*failing, *rest])))
        layers = [name for name in every if name not in failing]
        found = self._best_ranges(fused, params, seen, failing)
        if found is None:
            self.notes.append("int8: no graph runs here, see the reasons of its operators")
            return

        def build(rest: Collection[str], in_bfloat16: bool) -> tuple[Graph, Params]:
            if not in_bfloat16:
                return quantize(fused, params, found, {*rest, *failing})[:2]
            groups = {node.name: inner_operators(node) for node in fused.nodes() if not node.is_variable}
            full = {name for layer, names in groups.items() if layer not in rest for name in names}
            lowered, values = lower(base, params, full, quantizable=True)
            # A cast has the range of the tensor that it casts.
            casts = [node for node in lowered.nodes() if node.op == "amp_cast"]
            read = {f"{cast.name}_output": tensor_names(cast.inputs)[0] for cast in casts}
            more = {name: found[source] for name, source in read.items() if source in found}
            return quantize(lowered, values, {**found, **more}, {*rest, *failing})[:2]

        kept = self._fall_back(INT8, layers, lambda rest: build(rest, False), why=failing)
        if kept and any(name.startswith(BFLOAT16) and not row.verdict for name, row in self._rows.items()):
            name = _candidate_name(INT8, len(kept), BFLOAT16)
            self._try(name, lambda: build(kept, True), dict.fromkeys(kept, "for accuracy"))

    def _note_unfit(self, layers: Mapping[str, str]) -> None:
        if layers:
            named = "; ".join(f"{name!r}, as {why}" for name, why in list(layers.items())[:_NAMED])
            more = f"; and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
            self.notes.append(f"int8: the range of some values is not known, so these stay out: {named}{more}")

    def _is_slow(self, dtype: str, build: Callable[[], tuple[Graph, Params]]) -> bool:
        """Return whether a graph with all layers in ``dtype`` is slower than FP32, and note it; False if it fails."""
        full = self._full_candidates()
        try:
            self._runner.add("trial", *build())
            times = self._runner.ask("times", [*full, "trial"], _FEWEST_ROUNDS)
        except _FAILURES:
            return False
        best = min(full, key=lambda name: statistics.median(times[name]))
        speed = gain(times, "trial", best)[1]
        if speed < _SLOW:
            self.notes.append(f"{dtype}: its layers were not tried one by one: all in it are {speed:.2f} times as fast")
        return speed < _SLOW

    def _full_candidates(self) -> list[str]:
        return [name for name in (PLAIN, FOLDED, FUSED) if name in self._rows and not self._rows[name].verdict]

    def _best_ranges(self, fused: Graph, params: Params, seen: Statistics, failing: Mapping[str, str]) -> Ranges | None:
        """Return the ranges with which INT8 has the highest SQNR, which is kept; None if it cannot run with any."""
        self._tell("calibrators")
        ranges: dict[str, Ranges] = {}
        for name in CALIBRATORS:
            try:
                ranges[name] = self._runner.ask("ranges", seen, name)
                made = quantize(fused, params, ranges[name], failing)[:2]
                self._calibrators[name] = self._sqnr_of(made, self._held)
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
        kinds = {node.name: node.op for node in fuse(self._base[0], quantizable=True).nodes()}
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
        self,
        dtype: str,
        layers: Sequence[str],
        build: Build,
        why: Mapping[str, str] | None = None,
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
                name = _candidate_name(dtype, count, "float32")
                tried[count] = self._try(name, lambda: build(order[:count]), reasons)
            return tried[count]

        if within(0):
            return []
        is_many = dtype == BFLOAT16 and len(layers) > _FEW and dtype in self._tried
        if is_many and self._is_slow(dtype, lambda: self._tried[dtype][:2]):
            return []
        if dtype not in self._alone:
            self._measure_alone(dtype, layers, build)
            order = self._by_cost(dtype, layers)
        most = len(layers) - 1
        count, failed = min(1, most), 0
        while count < most and not within(count):
            count, failed = min(2 * count, most), count
        if not most or not within(count):
            failure = self._rows[dtype].verdict
            inaccurate = "no graph with a layer in it is accurate enough"
            self.notes.append(f"{dtype}: {failure if failure.startswith(_FAILS) else inaccurate}")
            return []
        while count - failed > 1:
            middle = (count + failed) // 2
            count, failed = (middle, failed) if within(middle) else (count, middle)
        return order[:count]

    def _by_cost(self, dtype: str, layers: Sequence[str]) -> list[str]:
        """Return the layers in the order in which they go to FP32; as given, before ``_measure_alone``."""
        alone = self._alone.get(dtype, {})
        return sorted(layers, key=lambda name: alone.get(name, -np.inf))  # most costs one that cannot run

    def _try(self, name: str, build: Callable[[], Made], why: Mapping[str, str], same: bool = False) -> bool:
        """Run a candidate; return True if it is within the ``Limits`` or, with ``same``, as FP32 but for rounding.
        ``why`` has reasons for dtypes, by operator."""
        try:
            graph, params = build()
            outputs = self._outputs(name, (graph, params), list(self._reference) if same else self._held)
        except _FAILURES as error:
            self._rows[name] = Candidate(name, verdict=_fails(error))
            return False
        self._tried[name] = graph, params, why
        ratio, worst, agreement = self._compared(outputs)
        limits, score, verdict = self._limits, None, ""
        if same:
            verdict = "" if ratio >= _SAME else f"has other outputs: below {_SAME:.0f} dB"
        elif limits.evaluate is not None:
            score = limits.evaluate(graph, params)
            verdict = "" if self._score - score <= limits.max_drop else f"loses {self._score - score:.4g}"
        elif worst < limits.min_sqnr:
            verdict = f"below {limits.min_sqnr:.0f} dB"
        elif agreement is not None and agreement < 1 - limits.max_drop:
            verdict = f"{1 - agreement:.1%} of the answers are others"
        self._rows[name] = Candidate(
            name, sqnr=ratio, column_sqnr=worst, agreement=agreement, score=score, verdict=verdict
        )
        return not verdict

    def _compared(self, found: Mapping[int, Sequence[np.ndarray]]) -> tuple[float, float, float | None]:
        """Return how near outputs, by the position of a batch, are to FP32's: sqnr, column_sqnr and agreement."""
        pooled, worst, same = [], [], []
        for place, head in enumerate(self._base[0].heads):
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
        names = [name for name, row in self._rows.items() if not row.verdict and self._runs_again(name)]
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
            best = max((gains[n][1] for n in others if n.startswith(dtype)), default=None)
            if best is not None and best <= 1:
                self.notes.append(f"{dtype} does not pay here: {best:.2f} times as fast as {baseline}")
        rows = [
            row._replace(milliseconds=1e3 * middle[name], gain=gains[name]) if name in middle else row
            for name, row in self._rows.items()
        ]
        graph, params, _ = self._tried[chosen]
        report = InferenceReport(chosen, baseline, rows, self._layers(chosen), self._calibrators, self.notes)
        return graph, params, report

    def _runs_again(self, name: str) -> bool:
        """Return whether a candidate runs several times; that it fails is its verdict, but for the network itself."""
        try:
            self._runner.ask("times", [name], 1)
        except CandidateError as error:
            if name == PLAIN:
                raise
            self._rows[name] = self._rows[name]._replace(verdict=_fails(error))
        return not self._rows[name].verdict

    def _layers(self, name: str) -> list[Layer]:
        """Return a report's ``Layer`` of each operator of a candidate, which runs once more for the times."""
        graph, _, why = self._tried[name]
        spent = self._runner.ask("profile", name)
        kind = name.partition(",")[0]
        layers, alone = [], self._alone.get(kind, {})
        in_fp32 = _ALL_FP32 if kind == "float32" else f"no {kind} kernel is tried for it"
        for node in graph.nodes():
            if node.is_variable:
                continue
            own = node.name[len(QUANTIZED) :] if node.name.startswith(QUANTIZED) else node.name
            names = f"{node.name}_output", f"{node.name}_output0"  # MXNet numbers several outputs of most operators
            milliseconds, dtype = next((spent[name] for name in names if name in spent), (None, "float32"))
            dtype = INT8 if own != node.name or dtype == "uint8" else dtype
            reason = why.get(own) or ("within the accuracy that was requested" if dtype != "float32" else in_fp32)
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


def _candidate_name(dtype: str, count: int, other: str) -> str:
    return f"{dtype}, {count} in {other}" if count else dtype


def _fails(error: Exception) -> str:
    return f"{_FAILS}: {last_line(error)[-350:]}"
