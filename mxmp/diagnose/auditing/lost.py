"""What an operator's rounding has lost, read from FP32's values around it."""

from __future__ import annotations

import re
from typing import Iterable, Mapping

import numpy as np

from ..watching.histogram import FORMATS
from .report import Change

# The unit roundoff of each dtype: the largest relative error of one rounding.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
# Values this much larger than what is left of them lose what is left (an eighth of the digits of bfloat16).
_BESIDE = 8.0
# Operators that cut values off at a number of the graph.
_CLIPS = ("clip", "_maximum_scalar", "_minimum_scalar")
_DIFFERENCES = re.compile(r"sub|minus|diff|norm|elemwise_add|broadcast_add|_plus", re.IGNORECASE)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return FP32 values rounded to ``dtype``, in FP32 again."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    low = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to nearest, ties to even
    return np.where(np.isfinite(values), low.astype(np.uint32).view(np.float32), values)


def _rounded_number(number: float, dtype: str) -> float:
    return float(rounded(np.array([number], np.float32), dtype)[0])


def what_was_lost(
    name: str,
    op: str,
    attrs: Mapping[str, str],
    around: Mapping[str, np.ndarray],
    change: Change,
    dtype: str,
    constants: set[int],
) -> tuple[str, str]:
    """Return which of ``report.LOST`` an operator's rounding is, and a sentence with the tensor and its numbers.
    ``around`` is what ``Replays.tapped`` returns; ``constants`` are the positions of inputs that are constants.
    """
    out = around.get(name)
    inputs = {key: value for key, value in around.items() if key.startswith(f"{name} < ")}
    tensors = [(f"its input {key.rpartition(' < ')[2]}", value) for key, value in inputs.items()]
    tensors += [("its output", out)] if out is not None else []
    tensors = [(what, value) for what, value in tensors if value.size]
    for what, value in tensors:
        low = rounded(value, dtype)
        if np.isfinite(value).all() and not np.isfinite(low).all():
            return (
                "overflowed",
                f"{what} has {np.abs(value).max():.4g}, and {dtype} ends at {FORMATS[dtype].largest:.5g}",
            )
    for what, value in tensors[: len(inputs)]:
        low = rounded(value, dtype)
        if 16 < np.abs(value).max() < 2**24 and (value == np.round(value)).all() and (low != value).any():
            worst = value[low != value].flat[0]
            kind = "constant rounded" if int(what.split()[-1]) in constants else "integer rounded"
            return kind, f"{what} has the whole number {worst:.10g}, which {dtype} does not have"
    if out is not None:
        for limit in _limits(op, attrs, out):
            low = rounded(out, dtype)
            reached = (low == _rounded_number(limit, dtype)) & (out != np.float32(limit))
            near = (np.abs(out - limit) < 2.0**-3 * max(1.0, abs(limit))) & (out != np.float32(limit))
            if reached.any() and reached.sum() * 16 >= near.sum():
                nearest = out[reached].flat[np.argmax(np.abs(out[reached] - limit))]
                return "saturated", f"{reached.sum()} of {out.size} values, such as {nearest:.7g}, became {limit:g}"
            if near.any() and op in _CLIPS and _rounded_number(limit, dtype) != np.float32(limit):
                return "constant rounded", f"its limit {limit:.8g} is none of {dtype}'s numbers"
    for what, value in tensors[: len(inputs)]:
        if int(what.split()[-1]) in constants:
            return "constant rounded", f"{what} is a constant of the network, up to {np.abs(value).max():.4g}"
    found = _cancelled(name, op, out, tensors, around)
    if found:
        return "cancelled", found
    for number in _scalars(attrs):
        stored = _rounded_number(number, dtype)
        if stored != np.float32(number) and (stored == 0 or abs(number) > 256):
            return "constant rounded", f"the number {number:.8g} becomes {stored:.8g}"
    for what, value in tensors:
        low = rounded(value, dtype)
        gone = (low == 0) & (value != 0)
        if gone.sum() * 8 > (value != 0).sum():
            return "underflowed", f"{gone.sum()} of {value.size} values of {what} became zero"
    if change.gradient is not None and change.times_noise and not np.isfinite(change.gradient):
        return "overflowed", f"the gradient of {change.parameter} became inf or NaN in its backward"
    if change.gradient is not None and change.gradient == 1.0:
        return "underflowed", f"the gradient of {change.parameter} became zero in its backward"
    size = f"up to {np.abs(out).max():.4g}" if out is not None and out.size else "of unknown size"
    return "rounded", f"its output, {size}, rounded to {dtype}"


def _limits(op: str, attrs: Mapping[str, str], out: np.ndarray) -> Iterable[float]:
    if op == "clip":
        return [float(attrs[key]) for key in ("a_min", "a_max") if key in attrs]
    if op in _CLIPS:
        return _scalars(attrs)
    return (-1.0, 1.0) if np.abs(out).max(initial=0) <= 1 else ()


def _scalars(attrs: Mapping[str, str]) -> list[float]:
    try:
        return [float(attrs["scalar"])] if "scalar" in attrs else []
    except ValueError:
        return []


def _cancelled(name: str, op: str, out: np.ndarray | None, tensors: list, around: Mapping[str, np.ndarray]) -> str:
    """Say if a difference leaves little of what was read or written, or a column has an offset."""
    inputs = [value for what, value in tensors if what != "its output"]
    if out is not None and _DIFFERENCES.search(op) and inputs:
        most, left = max(_size(each) for each in inputs), _size(out)
        if most > _BESIDE * left:
            return f"its inputs are up to {most:.4g}, and it leaves {left:.4g}"
    for key, value in around.items():
        reader = key.rpartition(" > ")[2] if key.startswith(f"{name} > ") else ""
        is_read = out is not None and value.size and _DIFFERENCES.search(reader)
        if out is not None and is_read and _size(out) > _BESIDE * _size(value):
            return f"its output is up to {_size(out):.4g}, of which {reader} leaves {_size(value):.4g}"
    for what, value in tensors:
        if value.ndim and len(value) > 1:
            columns = value.reshape(-1, value.shape[-1]) if value.ndim > 1 else value.reshape(-1, 1)
            spread, mean = columns.std(axis=0), np.abs(columns.mean(axis=0))
            worst = int(np.argmax(mean / np.maximum(spread, 1e-30)))
            if mean[worst] > _BESIDE * spread[worst] > 0:
                return f"{what} has a column of {mean[worst]:.5g} with a spread of {spread[worst]:.3g}"
    return ""


def _size(values: np.ndarray) -> float:
    return float(np.abs(values).max())
