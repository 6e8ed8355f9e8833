"""What an operator's rounding has lost, read from FP32's values around it."""

from __future__ import annotations

import re
from typing import Collection, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from ...precision.graph import Node
from ..watching.histogram import FORMATS
from .report import Change

# The unit roundoff of each dtype: the largest relative error of one rounding.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
# Values this much larger than what is left of them lose what is left (an eighth of the digits of bfloat16).
_BESIDE = 8.0
# How far rounding may move a column of data, in units of its deviation, that so many rows show.
_DIGITS, _ROWS = 0.02, 16
# Operators that cut values off at a number of the graph.
_CLIPS = ("clip", "_maximum_scalar", "_minimum_scalar")
_DIFFERENCES = re.compile(r"sub|minus|diff|norm|elemwise_add|broadcast_add|_plus", re.IGNORECASE)


class Around(NamedTuple):
    """An operator with FP32's values: what it reads, its first output, and what its readers make of it, by name."""

    node: Node
    inputs: Sequence[np.ndarray]
    output: np.ndarray
    readers: Mapping[str, np.ndarray]


class _Tensor(NamedTuple):
    """A tensor that is not empty, as it is called in a report; ``low`` is what rounding leaves of it."""

    what: str
    value: np.ndarray
    low: np.ndarray
    is_constant: bool = False


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return FP32 values rounded to ``dtype``, in FP32 again."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    low = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to nearest, ties to even
    return np.where(np.isfinite(values), low.astype(np.uint32).view(np.float32), values)


def loses_digits(data: np.ndarray, dtype: str) -> bool:
    """Return whether rounding moves a column of ``data``, on its last axis, by more than 2 % of its deviation."""
    rows = data.reshape(-1, data.shape[-1] if data.ndim > 1 else 1)
    if len(rows) < _ROWS or not np.isfinite(rows).all():
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        moved = np.sqrt(np.mean((rounded(rows, dtype) - rows) ** 2, axis=0))
    spread = rows.std(axis=0)
    return bool(((spread > 0) & (moved > _DIGITS * spread)).any())


def _rounded_number(number: float, dtype: str) -> float:
    return float(rounded(np.array([number], np.float32), dtype)[0])


def what_was_lost(around: Around, change: Change, dtype: str, constants: Collection[str]) -> tuple[str, str]:
    """Return which of ``report.LOST`` an operator's rounding is, and a sentence with the tensor and its numbers.
    ``constants`` are the names of variables that no training changes.
    """
    op, attrs, out = around.node.op, around.node.attrs, around.output
    inputs = [
        _Tensor(f"its input {i}", value, rounded(value, dtype), entry.node.name in constants)
        for i, (entry, value) in enumerate(zip(around.node.inputs, around.inputs))
        if value.size
    ]
    outputs = [_Tensor("its output", out, rounded(out, dtype))] if out.size else []
    tensors = inputs + outputs
    for what, value, low, _ in tensors:
        if np.isfinite(value).all() and not np.isfinite(low).all():
            return "overflowed", f"{what} has {_size(value):.4g}, and {dtype} ends at {FORMATS[dtype].largest:.5g}"
    for what, value, low, is_constant in inputs:
        if 16 < _size(value) < 2**24 and (value == np.round(value)).all() and (low != value).any():
            kind = "constant rounded" if is_constant else "integer rounded"
            worst = value[low != value].flat[0]
            return kind, f"{what} has the whole number {worst:.10g}, which {dtype} does not have"
    for each in outputs:
        for limit in _limits(op, attrs, out):
            is_other = out != np.float32(limit)
            reached = (each.low == _rounded_number(limit, dtype)) & is_other
            near = (np.abs(out - limit) < 2.0**-3 * max(1.0, abs(limit))) & is_other
            if reached.any() and reached.sum() * 16 >= near.sum():
                nearest = out[reached].flat[np.argmax(np.abs(out[reached] - limit))]
                return "saturated", f"{reached.sum()} of {out.size} values, such as {nearest:.7g}, became {limit:g}"
            if near.any() and op in _CLIPS and _rounded_number(limit, dtype) != np.float32(limit):
                return "constant rounded", f"its limit {limit:.8g} is none of {dtype}'s numbers"
    for each in inputs:
        if each.is_constant:
            return "constant rounded", f"{each.what} is a constant of the network, up to {_size(each.value):.4g}"
    cancelled = _cancelled(op, inputs, out, around.readers) or _offset(tensors)
    if cancelled:
        return "cancelled", cancelled
    for number in _scalars(attrs):
        stored = _rounded_number(number, dtype)
        if stored != np.float32(number) and (stored == 0 or abs(number) > 256):
            return "constant rounded", f"the number {number:.8g} becomes {stored:.8g}"
    for what, value, low, _ in tensors:
        gone = ((low == 0) & (value != 0)).sum()
        if gone * 8 > (value != 0).sum():
            return "underflowed", f"{gone} of {value.size} values of {what} became zero"
    if change.gradient is not None and change.times_noise and not np.isfinite(change.gradient):
        return "overflowed", f"the gradient of {change.parameter} became inf or NaN in its backward"
    if change.gradient == 1.0:
        return "underflowed", f"the gradient of {change.parameter} became zero in its backward"
    size = f"up to {_size(out):.4g}" if out.size else "of unknown size"
    return "rounded", f"its output, {size}, rounded to {dtype}"


def _limits(op: str, attrs: Mapping[str, str], out: np.ndarray) -> Iterable[float]:
    if op == "clip":
        return [float(attrs[key]) for key in ("a_min", "a_max") if key in attrs]
    if op in _CLIPS:
        return _scalars(attrs)
    return (-1.0, 1.0) if _size(out) <= 1 else ()


def _scalars(attrs: Mapping[str, str]) -> list[float]:
    try:
        return [float(attrs["scalar"])] if "scalar" in attrs else []
    except ValueError:
        return []


def _cancelled(op: str, inputs: Sequence[_Tensor], out: np.ndarray, readers: Mapping[str, np.ndarray]) -> str:
    """Say if a difference leaves little of what was read or written."""
    most, left = max((_size(each.value) for each in inputs), default=0.0), _size(out)
    if _DIFFERENCES.search(op) and most > _BESIDE * left:
        return f"its inputs are up to {most:.4g}, and it leaves {left:.4g}"
    for reader, value in readers.items():
        if value.size and _DIFFERENCES.search(reader) and left > _BESIDE * _size(value):
            return f"its output is up to {left:.4g}, of which {reader} leaves {_size(value):.4g}"
    return ""


def _offset(tensors: Sequence[_Tensor]) -> str:
    """Say if a column has an offset that is large beside its spread."""
    for what, value, *_ in tensors:
        if value.ndim and len(value) > 1:
            columns = value.reshape(-1, value.shape[-1]) if value.ndim > 1 else value.reshape(-1, 1)
            spread, mean = columns.std(axis=0), np.abs(columns.mean(axis=0))
            worst = int(np.argmax(mean / np.maximum(spread, 1e-30)))
            if mean[worst] > _BESIDE * spread[worst] > 0:
                return f"{what} has a column of {mean[worst]:.5g} with a spread of {spread[worst]:.3g}"
    return ""


def _size(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0))
