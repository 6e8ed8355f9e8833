"""``optimize_for_inference``: the fastest graph that is still right."""

from __future__ import annotations

from math import isfinite
from typing import Any, Callable, Iterable, Mapping, Sequence

import mxnet as mx
from mxnet.gluon import HybridBlock
from mxnet.ndarray import NDArray

from ..child import showing
from ..precision.graph import Graph
from .folding import Params
from .report import InferenceReport
from .runner import Runner
from .search import BFLOAT16, INT8, Limits, Search
from .targets import Batch, OptimizedBlock, OptimizedSymbol, read_target, served

__all__ = ["optimize_for_inference"]


def optimize_for_inference(
    target: HybridBlock | mx.sym.Symbol,
    calibration: Iterable[Any],
    *,
    dtypes: Iterable[str] = (INT8, BFLOAT16),
    evaluate: Callable[[Any], float] | None = None,
    max_drop: float = 0.01,
    min_sqnr: float = 20.0,
    arg_params: Mapping[str, NDArray] | None = None,
    aux_params: Mapping[str, NDArray] | None = None,
    progress: bool = True,
) -> OptimizedBlock | OptimizedSymbol:
    """Return the fastest graph for a CPU that is still right, of those in FP32, bfloat16 and INT8.

    BatchNorm is folded into the layers before it, MXNet's oneDNN fusion is applied where it is right, weights are cast
    once, and INT8 is MXNet's own. What is slower than the faster of FP32 unfused and fused is not served. ``target``
    is left as it is. Candidates run in a process of their own, so a crash of a kernel is a reason, not an end.

    Parameters
    ----------
    target : HybridBlock or Symbol
        In FP32 or converted.
    calibration : iterable of batches
        Each is what the network is called with: an array, a tuple of arrays, a ``DataBatch``, or for a Symbol a dict
        by name. Two thirds of them calibrate, the others measure; one batch alone is cut in two. The first one is
        timed, so it should have the shape that is served.
    dtypes : iterable of str
        Of ``"int8"`` and ``"bfloat16"``; FP32 is always among the candidates, and alone with ``()``.
    evaluate : callable, optional
        From what this function returns (a block to call, or an ``OptimizedSymbol``) to a number, higher is better. It
        is called in this process, for FP32 and for each candidate. It chooses, so judge the result on other data.
    max_drop : float
        What ``evaluate`` may lose, in its unit. Without it: the share of top answers that may be others than FP32's.
    min_sqnr : float
        Without ``evaluate``: the least signal to noise ratio of the outputs against FP32's, in dB.
    arg_params, aux_params : mapping of str to NDArray
        The parameters of a Symbol.
    progress : bool
        Show a bar on a terminal, where tqdm is installed.

    Returns
    -------
    OptimizedBlock or OptimizedSymbol
        ``print(found.report)``; ``found.export(prefix)`` writes files that plain MXNet loads.

    Raises
    ------
    TypeError
        ``target`` is neither.
    ValueError
        There is no calibration data, it does not fit or is not finite, a dtype is unknown, the block cannot be traced,
        or ``evaluate`` returned no finite number.
    """
    requested = _checked(dtypes, max_drop)
    subject = read_target(target, calibration, arg_params, aux_params)
    batches, calibrating, held, notes = _split(subject.batches)

    def score(graph: Graph, params: Params) -> float:
        assert evaluate is not None
        value = evaluate(served(subject, graph, params, _PENDING))
        if not isfinite(value):
            raise ValueError(f"evaluate returned {value!r}: expected a finite number, higher for a better network")
        return float(value)

    limits = Limits(max_drop, min_sqnr, None if evaluate is None else score)
    with Runner(batches) as runner, showing(progress) as tell:
        search = Search(subject.graph, subject.params, runner, calibrating, held, limits, tell)
        search.notes += notes
        if INT8 in requested and not _has_vnni():
            requested.remove(INT8)
            search.notes.append(
                "int8 was left out: this CPU has no VNNI, so its INT8 kernels are slow and may overflow"
            )
        found = search.run(requested)
    return served(subject, found.graph, found.params, found.report)


_PENDING = InferenceReport("", "", [], [], {}, [])


def _checked(dtypes: Iterable[str], max_drop: float) -> list[str]:
    requested = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    for dtype in requested:
        if dtype not in (INT8, BFLOAT16, "float32"):
            hint = ": float16 is for GPUs, by mxmp.convert or mxmp.cast_symbol" if dtype == "float16" else ""
            raise ValueError(f"dtypes: {dtype!r} is none of {INT8!r} and {BFLOAT16!r}{hint}")
    if not max_drop >= 0:
        raise ValueError(f"max_drop={max_drop!r}: expected a number from 0, in the unit of evaluate")
    return requested


def _split(batches: Sequence[Batch]) -> tuple[Sequence[Batch], list[int], list[int], list[str]]:
    """Return the batches, the numbers of those that calibrate and of those that measure, and what to say of them."""
    if len(batches) > 1:
        held = max(len(batches) // 3, 1)
        return batches, list(range(len(batches) - held)), list(range(len(batches) - held, len(batches))), []
    (batch,) = batches
    rows = {array.shape[0] if array.ndim else 1 for array in batch.values()}
    if len(rows) == 1 and min(rows) > 1:
        half = min(rows) // 2
        parts = [{name: array[:half] for name, array in batch.items()}, {n: a[half:] for n, a in batch.items()}]
        return [batch, *parts], [1], [2], []
    return batches, [0], [0], ["one batch both calibrated and measured: SQNR is that of data that was seen"]


def _has_vnni(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Return whether the CPU multiplies INT8 exactly; True where nobody says."""
    try:
        with open(cpuinfo, encoding="utf-8") as file:
            known = file.read()
    except OSError:
        return True
    return "flags" not in known or any(flag in known for flag in ("avx512_vnni", "avx_vnni", "amx_int8"))
