"""Checks that a checkpoint's parameters are those of a Symbol, and that float16 can hold them."""

from __future__ import annotations

from typing import Iterator, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..precision.graph import TYPE_CODES, Graph, Node, inferred
from ..step.gradients import is_finite

# Operators whose inputs after the first are parameters; and those whose inputs at some positions are.
_AFTER_DATA = frozenset(
    [
        *("FullyConnected", "Convolution", "Deconvolution", "Embedding"),
        *("BatchNorm", "LayerNorm", "InstanceNorm", "GroupNorm"),
        *("_contrib_SyncBatchNorm", "_contrib_SparseEmbedding", "_contrib_BatchNormWithReLU"),
    ]
)
_AT = {"RNN": (1,), "LeakyReLU": (1,)}
_MOST_AXES = 5


def check_parameters(
    symbol: mx.sym.Symbol, params: Mapping[str, NDArray], shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    """Raise ``ValueError`` unless a checkpoint's parameters are those of a Symbol, by names and shapes.
    Returns whether shapes could be checked: whether the Symbol accepts ``shapes``, or a trial without them."""
    kinds = dict.fromkeys(symbol.list_arguments(), "arg")
    kinds.update(dict.fromkeys(symbol.list_auxiliary_states(), "aux"))
    extra = sorted(key for key in params if key[4:] not in kinds)
    if extra:
        raise ValueError(f"the symbol has no {', '.join(extra[:5])}")
    saved = {key[4:]: array.shape for key, array in params.items()}
    for key in params:
        name = key[4:]
        if key[:3] != kinds[name]:
            what = "an auxiliary state" if kinds[name] == "aux" else "an argument"
            raise ValueError(f"{name} is {what} of the symbol: expected '{kinds[name]}:{name}', got {key!r}")
    nodes = Graph.from_symbol(symbol).nodes()
    needed = {name for name, kind in kinds.items() if kind == "aux"} | set(_parameter_names(nodes))
    missing = sorted(needed - set(saved) - set(shapes))
    if missing:
        raise ValueError(f"it lacks {', '.join(missing[:5])}")
    wrong = [_first_mismatch(sizes, saved) for sizes in _expected_sizes(symbol, nodes, saved, shapes)]
    if wrong and all(wrong):
        raise ValueError(wrong[-1])
    return bool(wrong)


def cast_parameters(params: Mapping[str, NDArray], low: mx.sym.Symbol) -> dict[str, NDArray]:
    """Return a checkpoint's FP32 parameters in the dtypes in which a Symbol of ``cast_symbol`` stores them.
    Waits for the device. Raises ``ValueError`` for a finite value beyond 65504 that would be float16."""
    attrs = low.attr_dict()
    found = {}
    for key, array in params.items():
        found[key] = array
        if attrs.get(key[4:], {}).get("__dtype__") == TYPE_CODES["float16"]:
            found[key] = half = array.astype("float16")
            over = (1 - is_finite(half.astype(array.dtype))) * is_finite(array)
            if over.sum().asscalar():
                largest = (array * over).abs().max().asscalar()
                raise ValueError(
                    f"{key[4:]} has a value of size {largest:g}, and float16 ends at 65504: keep the operator that "
                    "reads it in FP32 (--exclude NAME)"
                )
    return found


def _parameter_names(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield the names of variables that a checkpoint must have: weights, gammas, running means and the like."""
    for node in nodes:
        for position, entry in enumerate(node.inputs):
            if entry.node.is_variable and (
                position in _AT.get(node.op, ()) or (position > 0 and node.op in _AFTER_DATA)
            ):
                yield entry.node.name


# For each parameter, by name, a pair for every axis: its size for one input shape, and for another input shape.
_Sizes = Mapping[str, "list[tuple[int, int]]"]


def _expected_sizes(
    symbol: mx.sym.Symbol,
    nodes: Sequence[Node],
    saved: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[_Sizes]:
    """Yield, for each trial of input shapes, a pair of sizes per axis of each parameter: for a small and a large input.
    ``{"fc_weight": [(10, 10), (576, 1088)]}``: the number of columns depends on the input, so it may be any. Without
    ``shapes`` the first input is tried with one to five axes; a trial that the Symbol refuses yields nothing."""
    inputs = [name for name in symbol.list_arguments() if name not in saved]
    if shapes:
        trials = [(shapes, shapes)]
    else:
        groups = max((int(node.attrs.get("num_group", "1")) for node in nodes), default=1)
        small, large = ([groups * 64 * (each + axis) for axis in range(_MOST_AXES)] for each in (8, 16))
        trials = [
            ({inputs[0]: tuple(small[:axes])}, {inputs[0]: tuple(large[:axes])})
            for axes in range(1, _MOST_AXES + 1)
            if inputs
        ]
    for one, other in trials:
        try:
            first, second = (inferred(symbol, symbol.infer_shape_partial, each) for each in (one, other))
        except mx.MXNetError:
            continue
        yield {
            name: list(zip(first[name], second[name]))
            for name in saved
            if first[name] and len(first[name]) == len(second[name])
        }


def _first_mismatch(sizes: _Sizes, saved: Mapping[str, tuple[int, ...]]) -> str:
    """Return an error message for the first parameter whose saved shape does not fit ``sizes``, or ``""``."""
    known: dict[tuple[int, int], int] = {}
    for name, axes in sizes.items():
        shape = saved[name]
        # A size that depends on the input may be any, but the same on all axes with the same pair.
        expected = [size[0] if size[0] == size[1] else known.get(size, 0) for size in axes]
        if len(shape) != len(axes) or any(want not in (0, got) for want, got in zip(expected, shape)):
            wanted = ", ".join(str(size or "any") for size in expected)
            return f"{name} has shape {shape}, expected ({wanted})"
        known.update({size: got for size, got in zip(axes, shape) if size[0] != size[1]})
    return ""
