"""One operator, measured: what mxmp's graph of it computes in a low dtype against FP32 on the same rounded inputs.

Run by ``runner.py``, once for each pattern that malloc leaves in fresh memory; every operator in a process of its own,
forked from one that has imported MXNet and computed nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from typing import Any, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from support.operators.case import CASES, Case, as_read, digest, forced_graph
from support.operators.errors import Errors, rounded, ulp
from support.operators.running import reason_of

from mxmp.precision.graph import Node

_VALUES, _DRAWS = 512, (12, 32)  # per tensor: drawn again until there are as many values
_COPY, _DOUBLE = Node("_copy", ""), Node("Cast", "", {"dtype": "float64"})
# FP32's own gradient leaves memory unwritten where a kernel meets only padding; MXNet's float64 kernel does not.
_BY_FLOAT64 = ("Convolution", "Deconvolution")
_SECONDS = 60  # for one case; then SIGALRM ends the process
_BEFORE = 0.5  # what a gradient buffer holds that is added to
_STALE = 13.0  # what it holds where it is written


class Run(NamedTuple):
    """Outputs and gradients (by position of the input) of one forward and backward."""

    outputs: list[np.ndarray]
    grads: dict[int, np.ndarray]


class _Bound:
    """A Symbol of a case, bound for one choice of ``grad_req``."""

    def __init__(self, symbol: mx.sym.Symbol, case: Case, requests: dict[int, str]) -> None:
        self._requests = requests
        self._args = {f"in{i}": mx.nd.zeros(spec.shape, dtype=spec.dtype) for i, spec in enumerate(case.inputs)}
        states = {name: self._args[name] for name in symbol.list_auxiliary_states()}
        arguments = {name: self._args[name] for name in symbol.list_arguments()}
        self._heads: list[mx.nd.NDArray] = []
        self._random = case.op == "Dropout"
        self._grads = {i: mx.nd.zeros(case.inputs[i].shape) for i in requests}
        grads = {f"in{i}": grad for i, grad in self._grads.items()} or None
        modes = {name: requests.get(int(name[2:]), "null") for name in arguments}
        self._executor = symbol.bind(mx.cpu(), arguments, grads, modes, states)

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
    array._sync_copyfrom(np.asarray(value, array.dtype, order="C"))


def requests_of(case: Case) -> Iterator[dict[int, str]]:
    """First write for all; then every subset of the inputs with write and with add, and mixtures for two inputs.

    Of more than three inputs: all, each alone, and all but one.
    """
    wanted = [i for i, spec in enumerate(case.inputs) if spec.grad]
    full = dict.fromkeys(wanted, "write")
    yield full
    if len(wanted) <= 3:
        subsets = [s for size in range(len(wanted) + 1) for s in itertools.combinations(wanted, size)]
    else:
        subsets = [tuple(wanted), *[(i,) for i in wanted], *[tuple(j for j in wanted if j != i) for i in wanted]]
    for kind, subset in itertools.product(("write", "add"), subsets):
        request = dict.fromkeys(subset, kind)
        if request != full and (request or kind == "write"):
            yield request
    if len(wanted) == 2:
        yield from ({wanted[0]: a, wanted[1]: b} for a, b in (("write", "add"), ("add", "write")))


def measure(case: Case, dtype: str, once: bool = False) -> dict[str, Any]:
    """The record of one case in one dtype, from many draws of its values or just ``once``, to compare bits."""
    tell("reference")
    low_symbol = forced_graph(case, dtype).to_symbol()
    case = as_read(case, dtype)
    plain, double = case.graph().to_symbol(), case.graph(_DOUBLE).to_symbol()
    references = [double] * (case.op in _BY_FLOAT64) + [plain]
    record: dict[str, Any] = {}
    for requests, symbol in itertools.product((list(requests_of(case)), [{}]), references):
        full = requests[0]
        try:
            reference = _Bound(symbol, case, full)
            draws = list(itertools.islice(_draws(case, dtype, reference), 1 if once else None))
            truths = [reference.run(values, heads) for values, heads in draws]
            record = {"why": record["why"]} if not full and record else {}
            break
        except mx.MXNetError as error:
            record = {"verdict": "unmeasurable", "why": f"FP32's backward: {reason_of(error)}"}
    else:
        return {**record, "why": record["why"].replace("'s backward", "")}
    record["fp32"] = _sums(truths[0])
    tell("low")
    try:
        low = _Bound(low_symbol, case, full)
        start = time.perf_counter()
        runs = [low.run(values, heads) for values, heads in draws]
        record["ms"] = round(1e3 * (time.perf_counter() - start) / len(runs), 2)
    except mx.MXNetError as error:
        amid_others = _alone(case.graph(_COPY).to_symbol(), case, full, draws[0])
        verdict = "error" if amid_others else "wrong in FP32 too"
        return {**record, "verdict": verdict, "why": reason_of(error)}
    record["sums"] = _sums(runs[0])
    judged = _judged(runs, truths, dtype)
    if judged["verdict"] != "sound" and not once:  # one draw says nothing of the mean
        # MXNet computes some gradients in place of what they are made from, where the graph owns both.
        inner = _Bound(case.graph(_COPY).to_symbol(), case, full)
        if _judged(runs, [inner.run(values, heads) for values, heads in draws], dtype)["verdict"] == "sound":
            judged["verdict"], record["why"] = "wrong in FP32 too", "behind and in front of another operator"
    record.update(judged)
    wrong = []
    for request in requests[1:]:
        named = " ".join(f"{i}:{kind}" for i, kind in request.items()) or "none"
        tell(f"low {named}")
        try:
            found = _Bound(low_symbol, case, request).run(*draws[0])
        except mx.MXNetError as error:
            if _alone(plain, case, request, draws[0]) is None:
                continue
            return {**record, "verdict": "error", "why": f"{named}: {reason_of(error)}"}
        record["sums"] += _sums(found)
        for i, value in found.grads.items():
            wanted = runs[0].grads[i]
            allowed = 2 * ulp(wanted, dtype) + 1e-6 * (request[i] == "add")
            if not (np.abs(value - wanted) <= allowed).all() and np.isfinite(wanted).all():
                fp32 = _alone(plain, case, request, draws[0])
                same = fp32 is None or (np.abs(value - fp32.grads[i]) <= allowed).all()
                wrong.append(f"{named}{' (in FP32 too)' if same else ''}")
    if wrong and record["verdict"] == "sound":
        record["verdict"] = "wrong in FP32 too" if all("FP32" in w for w in wrong) else "wrong gradient"
    if wrong:
        record["why"] = "; ".join(dict.fromkeys(wrong))[:160]
    return record


def _alone(symbol: mx.sym.Symbol, case: Case, request: dict[int, str], draw: tuple[Any, Any]) -> Run | None:
    """What plain FP32 makes of a request, or None where it fails."""
    try:
        return _Bound(symbol, case, request).run(*draw)
    except mx.MXNetError:
        return None


def _judged(runs: list[Run], truths: list[Run], dtype: str) -> dict[str, Any]:
    """Errors of the outputs and of the worst gradient, and a verdict."""
    forward, backward = Errors(), {i: Errors() for i in truths[0].grads}
    for run, truth in zip(runs, truths):
        for value, wanted in zip(run.outputs, truth.outputs):
            forward.add(value, wanted, dtype)
        for i, wanted in truth.grads.items():
            backward[i].add(run.grads[i], wanted, dtype)
    summaries = [e.summary() for e in backward.values()]
    worst = max(summaries, key=lambda s: (s[2], s[0]), default=(0.0, 0.0, False))
    out = forward.summary()
    bad = next((e.bad for e in [forward, *backward.values()] if e.bad), "")
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


def _sums(run: Run) -> list[float]:
    """What two runs of one computation agree on, whatever the alignment of their memory: a sum for each tensor."""
    tensors = [np.nan_to_num(t.astype("float64"), nan=1e30) for t in [*run.outputs, *run.grads.values()]]
    return [float(f"{np.abs(t).sum():.6g}") for t in tensors]


def tell(stage: str) -> None:
    """Leave word of what is tried next, for the parent to read where this process ends in it."""
    print(json.dumps({"stage": stage}), flush=True)


def work(op: str, wanted: list[tuple[str, str]], once: bool) -> None:
    """Measure the wanted (case, dtype) pairs of ``op``; one line of JSON each, on stdout."""
    cases = {case.name: case for case in CASES[op]}
    for name, dtype in wanted:
        case = cases[name]
        print(json.dumps({"start": [name, dtype]}), flush=True)
        signal.alarm(_SECONDS)
        with mx.util.np_shape(case.empty or op.startswith("_np")):
            record = {"graph": digest(case, dtype), **measure(case, dtype, once)}
        print(json.dumps({"done": [name, dtype], "record": record}), flush=True)


def serve() -> None:
    """For every line on stdin, an operator and its cases, a process of its own, which may end as it likes."""
    for line in sys.stdin:
        op, wanted, once = json.loads(line)
        child = os.fork()
        if not child:
            work(op, [tuple(pair) for pair in wanted], once)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        end = f"exit status {os.WEXITSTATUS(status)}" if os.WIFEXITED(status) else signal.Signals(status & 127).name
        print(json.dumps({"end": end}), flush=True)


if __name__ == "__main__":
    serve()
