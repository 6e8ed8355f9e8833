"""One operator, measured: what mxmp's graph of it computes in a low dtype against FP32 on the same rounded inputs.

Run by ``sweep_operators.py`` in a process of its own, once for each pattern that malloc leaves in fresh memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
import time
from typing import Any, Iterator, NamedTuple

import mxnet as mx
import numpy as np

from .case import CASES, Case
from .emission import digest, forced_graph

__all__ = ["measure", "ulp", "work"]

_BITS = {"bfloat16": (7, -126), "float16": (10, -14)}  # of the mantissa, and the smallest normal exponent
_LARGEST = {"bfloat16": 3.3895e38, "float16": 65504.0}
_VALUES, _DRAWS = 512, (12, 32)  # per tensor: drawn again until there are as many values
_BEFORE = 0.5  # what a gradient buffer holds that is added to
_STALE = 13.0  # what it holds where it is written


def rounded(value: np.ndarray, dtype: str) -> np.ndarray:
    """To the nearest value of ``dtype``, ties to even, in FP32."""
    if dtype == "float16":
        return value.astype("float16").astype("float32")
    bits = np.ascontiguousarray(value, "float32").view("uint32").astype("uint64")
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype("uint32").view("float32").reshape(value.shape)


def ulp(value: np.ndarray, dtype: str) -> np.ndarray:
    """The distance of the neighbours of ``value`` in ``dtype``; of small ones that of the tensor's typical value.

    A sum that happens to cancel is as wrong as its terms, so a sixteenth of the root mean square is the floor.
    """
    mantissa, smallest = _BITS[dtype]
    size = np.abs(value.astype("float64"))
    size = np.where(np.isfinite(size), size, 0)
    floor = math.sqrt(float(np.mean(size**2))) / 16 if size.size else 0.0
    exponent = np.floor(np.log2(np.maximum(np.maximum(size, floor), 2.0**smallest)))
    return np.exp2(exponent - mantissa)


class Run(NamedTuple):
    """Outputs and gradients (by position of the input) of one forward and backward."""

    outputs: list[np.ndarray]
    grads: dict[int, np.ndarray]


class _Bound:
    """A Symbol of a case, bound for one choice of ``grad_req``."""

    def __init__(self, symbol: mx.sym.Symbol, case: Case, requests: dict[int, str]) -> None:
        self._requests = requests
        self._args = {f"in{i}": mx.nd.zeros(spec.shape) for i, spec in enumerate(case.inputs)}
        states = symbol.list_auxiliary_states()
        self._states = {name: self._args[name] for name in states}
        arguments = {name: self._args[name] for name in symbol.list_arguments()}
        self._heads: list[mx.nd.NDArray] = []
        self._random = case.op == "Dropout"
        self._grads = {i: mx.nd.zeros(case.inputs[i].shape) for i in requests}
        self._executor = symbol.bind(
            mx.cpu(),
            arguments,
            {f"in{i}": grad for i, grad in self._grads.items()} or None,
            {name: requests.get(int(name[2:]), "null") for name in arguments},
            self._states,
        )

    def run(self, values: list[np.ndarray], heads: list[np.ndarray] | None) -> Run:
        for i, value in enumerate(values):
            _write(self._args[f"in{i}"], value)
        for i, grad in self._grads.items():
            _write(grad, np.full(grad.shape, _BEFORE if self._requests[i] == "add" else _STALE))
        if self._random:
            mx.random.seed(11)
        outputs = self._executor.forward(is_train=True)
        if heads is None:
            return Run([out.asnumpy() for out in outputs], {})
        if self._requests:
            self._heads = self._heads or [mx.nd.zeros(head.shape) for head in heads]
            for array, head in zip(self._heads, heads):
                _write(array, head)
            self._executor.backward(self._heads)
        grads = {i: g.asnumpy() - (_BEFORE if self._requests[i] == "add" else 0) for i, g in self._grads.items()}
        return Run([out.asnumpy() for out in outputs], grads)


def _write(array: mx.nd.NDArray, value: np.ndarray) -> None:
    """Ten times as fast as ``array[:] = value``."""
    array._sync_copyfrom(np.ascontiguousarray(value, "float32"))


def requests_of(case: Case) -> Iterator[dict[int, str]]:
    """Every choice of null, write and add for up to three inputs; for more: all, each alone, all but one."""
    wanted = [i for i, spec in enumerate(case.inputs) if spec.grad]
    yield dict.fromkeys(wanted, "write")
    if len(wanted) <= 3:
        for kinds in itertools.product(("write", "null", "add"), repeat=len(wanted)):
            if set(kinds) != {"write"}:
                yield {i: kind for i, kind in zip(wanted, kinds) if kind != "null"}
    else:
        yield dict.fromkeys(wanted, "add")
        for kind, i in itertools.product(("write", "add"), wanted):
            yield {i: kind}
            yield {j: kind for j in wanted if j != i}


class _Errors:
    """Errors in ulps, gathered over tensors of one case."""

    def __init__(self) -> None:
        self._found: list[tuple[np.ndarray, np.ndarray]] = []  # of every draw: errors, and the signs of the values
        self.bad = ""

    def add(self, value: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
        within = np.abs(wanted) <= _LARGEST[dtype]
        if np.isnan(value[~np.isnan(wanted)]).any() or not np.isfinite(value[within]).all():
            self.bad = "NaN" if np.isnan(value).any() else "infinity"
        good = within & np.isfinite(value)
        error = (value.astype("float64") - wanted)[good] / ulp(wanted, dtype)[good]
        self._found.append((error, np.sign(wanted[good])))

    def summary(self) -> tuple[float, float, bool]:
        """Mean absolute error; mean signed error, away from zero or upwards; whether it is beyond chance and 0.1."""
        found = [(e, s) for e, s in self._found if e.size]
        if not found:
            return 0.0, 0.0, False
        every = np.concatenate([e for e, _ in found])
        outwards = _mean([float(np.mean(e * s)) for e, s in found])
        upwards = _mean([float(np.mean(e)) for e, _ in found])
        bias, deviation = max(outwards, upwards, key=lambda pair: abs(pair[0]))
        return float(np.mean(np.abs(every))), bias, abs(bias) - 4 * deviation > 0.1


def _mean(values: list[float]) -> tuple[float, float]:
    """A mean over draws, and its standard deviation: values of one draw may be copies of each other."""
    return float(np.mean(values)), float(np.std(values)) / math.sqrt(max(len(values) - 1, 1))


def measure(case: Case, dtype: str, once: bool = False) -> dict[str, Any]:
    """The record of one case in one dtype, from many draws of its values or just ``once``, to compare bits."""
    tell("reference")
    reference_symbol = case.graph().to_symbol()
    low_symbol = forced_graph(case, dtype).to_symbol()
    requests = list(requests_of(case))
    full = requests[0]
    try:
        reference = _Bound(reference_symbol, case, full)
        draws = list(itertools.islice(_draws(case, dtype, reference), 1 if once else None))
        truths = [reference.run(values, heads) for values, heads in draws]
    except mx.MXNetError as error:
        return {"verdict": "unmeasurable", "why": f"FP32: {_first_line(error)}"}
    record: dict[str, Any] = {"fp32": _digest(truths[0])}
    tell("low")
    try:
        low = _Bound(low_symbol, case, full)
        start = time.perf_counter()
        runs = [low.run(values, heads) for values, heads in draws]
        record["ms"] = round(1e3 * (time.perf_counter() - start) / len(runs), 2)
    except mx.MXNetError as error:
        return {**record, "verdict": "error", "why": _first_line(error)}
    forward, backward = _Errors(), {i: _Errors() for i in full}
    for run, truth in zip(runs, truths):
        for value, wanted in zip(run.outputs, truth.outputs):
            forward.add(value, wanted, dtype)
        for i in full:
            backward[i].add(run.grads[i], truth.grads[i], dtype)
    record["bits"] = _digest(runs[0])
    record.update(_judged(forward, list(backward.values())))
    wrong = []
    for request in requests[1:]:
        named = " ".join(f"{i}:{kind}" for i, kind in request.items()) or "none"
        tell(f"low {named}")
        try:
            found = _Bound(low_symbol, case, request).run(*draws[0])
        except mx.MXNetError as error:
            return {**record, "verdict": "error", "why": f"{named}: {_first_line(error)}"}
        record["bits"] = hashlib.sha1((record["bits"] + _digest(found)).encode()).hexdigest()[:8]
        for i, value in found.grads.items():
            wanted = runs[0].grads[i]
            allowed = 2 * ulp(wanted, dtype) + 1e-6 * (request[i] == "add")
            if not (np.abs(value - wanted) <= allowed).all() and np.isfinite(wanted).all():
                plain = _Bound(reference_symbol, case, request).run(*draws[0]).grads[i]
                same = (np.abs(value - plain) <= allowed).all()
                wrong.append(f"{named}{'' if same else ' (in FP32 too)'}")
    if wrong and record["verdict"] == "sound":
        record["verdict"] = "wrong in FP32 too" if all("FP32" in w for w in wrong) else "wrong gradient"
    if wrong:
        record["why"] = "; ".join(dict.fromkeys(wrong))[:160]
    return record


def _judged(forward: _Errors, backward: list[_Errors]) -> dict[str, Any]:
    """Errors of the outputs and of the worst gradient, and a verdict."""
    summaries = [e.summary() for e in backward]
    worst = max(summaries, key=lambda s: (s[2], s[0]), default=(0.0, 0.0, False))
    out = forward.summary()
    bad = next((e.bad for e in [forward, *backward] if e.bad), "")
    verdict = bad or ("biased" if out[2] or worst[2] else "inaccurate" if max(out[0], worst[0]) > 1 else "sound")
    return {"forward": _short(out), "backward": _short(worst), "verdict": verdict}


def _draws(case: Case, dtype: str, bound: _Bound) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
    """Inputs and head gradients, rounded to ``dtype``, often enough for the mean of the errors to mean something."""
    rng = np.random.RandomState(5)
    shapes = [out.shape for out in bound.run([spec.values(rng) for spec in case.inputs], None).outputs]
    sizes = [int(np.prod(shape)) for shape in [*shapes, *(spec.shape for spec in case.inputs if spec.grad)]]
    times = 1 if case.empty else min(max(-(-_VALUES // max(min(sizes), 1)), _DRAWS[0]), _DRAWS[1])
    kept = {i for i, spec in enumerate(case.inputs) if not spec.grad}
    for _ in range(times):
        values = [spec.values(rng) for spec in case.inputs]
        values = [v if i in kept else rounded(v, dtype) for i, v in enumerate(values)]
        yield values, [rounded(rng.normal(0, 1, shape).astype("float32"), dtype) for shape in shapes]


def _short(summary: tuple[float, float, bool]) -> list[float]:
    return [float(f"{number:.3g}") for number in summary[:2]]


def _digest(run: Run) -> str:
    parts = [np.nan_to_num(a, nan=1e30).tobytes() for a in [*run.outputs, *run.grads.values()]]
    return hashlib.sha1(b"".join(parts)).hexdigest()[:8]


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(("Stack", "  ["))]
    return (lines[-1] if lines else type(error).__name__).split("Error: ")[-1].strip()[:160]


def tell(stage: str) -> None:
    """Leave word of what is tried next, for the parent to read where this process ends in it."""
    print(json.dumps({"stage": stage}), flush=True)


def work(op: str, wanted: list[tuple[str, str]], once: bool) -> None:
    """Measure the wanted (case, dtype) pairs of ``op``; one line of JSON each, on stdout."""
    cases = {case.name: case for case in CASES[op]}
    for name, dtype in wanted:
        case = cases[name]
        print(json.dumps({"start": [name, dtype]}), flush=True)
        with mx.util.np_shape(case.empty or op.startswith("_np")):
            record = {"graph": digest(case, dtype), **measure(case, dtype, once)}
        print(json.dumps({"done": [name, dtype], "record": record}), flush=True)


if __name__ == "__main__":
    from . import arithmetic, layout  # noqa: F401  (they fill CASES)

    work(sys.argv[1], json.load(sys.stdin), sys.argv[2:] == ["once"])
