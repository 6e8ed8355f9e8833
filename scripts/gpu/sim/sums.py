"""Sums of 4,096 equal terms, in each way in which an operator may add them: what float16 makes of them on a GPU.

    bash scripts/simgpu.sh python -m gpu.sim.sums            # into sums.json; goes on where it was ended
    bash scripts/simgpu.sh python -m gpu.sim.sums Pooling    # these operators again

A float16 sum of ones ends at 2,048. So each operator that a rule lets compute in float16 adds 4,096 ones somewhere,
forward or backward, with each value of an attribute, or each shape, by which MXNet chooses its kernel. Either a row of
``missing_kernels.py`` keeps the operator in FP32, or the outputs and gradients are those of FP32 to a few roundings.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Iterator

import mxnet as mx
import numpy as np
from support.operators.case import Case, Input
from support.operators.running import reason_of, run
from support.results import read, write

from mxmp.pipeline import low_graph
from mxmp.policy import Policy
from mxmp.precision.decide import decide
from mxmp.precision.rule import Kind
from mxmp.precision.rules import rule_of

RESULTS = Path(__file__).with_name("sums.json")  # operator -> case -> verdict
TERMS = 4096
SIDES = {1: 4096, 2: 64, 3: 16}  # of windows with so many values, by the number of axes
WHOLE, FP32, SHORT, REFUSED, ENDED = "whole", "FP32", "short", "refused in FP32 too", "not run"
ROUNDINGS = 2.0**-8  # of the largest value of an array
SECONDS = 300
ONE = 1.0


def ones(*shape: int) -> Input:
    return Input(shape, ONE)


def fixed(value: Any, *shape: int) -> Input:
    """Indices, lengths or conditions, without a gradient."""
    return Input(shape, value, grad=False)


def case(op: str, *inputs: Input | tuple[int, ...], outputs: int = 1, **attrs: Any) -> Case:
    made = tuple(each if isinstance(each, Input) else ones(*each) for each in inputs)
    return Case(op, made, {key: str(value) for key, value in attrs.items() if value is not None}, outputs)


def cases() -> Iterator[Case]:
    """Every case of the table."""
    for make in (convolutions, products, recurrent, broadcasts, copies, selections, poolings, resamplings, norms, adds):
        yield from make()


def convolutions() -> Iterator[Case]:
    for dims, off in itertools.product(SIDES, (None, True)):
        one, side, two = (1,) * dims, SIDES[dims], (2,) * dims
        layout = {1: "NWC", 2: "NHWC", 3: "NDHWC"}[dims]
        point: dict[str, Any] = {"kernel": one, "cudnn_off": off}
        window: dict[str, Any] = {"kernel": (side,) * dims, "num_filter": 1, "cudnn_off": off, "no_bias": True}
        for groups in (1, 2):
            images = {**point, "num_filter": 2, "num_group": groups}
            weight = (2, 2 // groups, *one)
            yield case("Convolution", (TERMS, 2, *one), weight, (2,), **images)
            yield case("Deconvolution", (TERMS, 2, *one), weight, (2,), **images, no_bias=False)
        yield case("Convolution", (TERMS, *one, 2), (2, *one, 2), (2,), **point, num_filter=2, layout=layout)
        yield case("Convolution", (1, TERMS, *one), (1, TERMS, *one), **point, num_filter=1, no_bias=True)
        yield case("Convolution", (1, 1, *one), (TERMS, 1, *one), **point, num_filter=TERMS, no_bias=True)
        yield case("Deconvolution", (1, TERMS, *one), (TERMS, 1, *one), **point, num_filter=1)
        yield case("Deconvolution", (1, 1, *one), (1, TERMS, *one), **point, num_filter=TERMS)
        for step in (1, 2) if dims < 3 else (1,):
            image = ((side - 1) * (step + 1) + 1,) * dims
            yield case("Convolution", (1, 1, *image), (1, 1, *(side,) * dims), **window, dilate=(step,) * dims)
        yield case("Deconvolution", (1, 1, *(side,) * dims), (1, 1, *(side,) * dims), **window)
        # Of a small window, with strides and padding: many images.
        small = {"kernel": (3,) * dims, "pad": one, "stride": two, "num_filter": 1, "cudnn_off": off, "no_bias": True}
        yield case("Convolution", (TERMS, 1, *(3,) * dims), (1, 1, *(3,) * dims), **small)
        yield case("Deconvolution", (TERMS, 1, *(2,) * dims), (1, 1, *(3,) * dims), **small, target_shape=(3,) * dims)


def products() -> Iterator[Case]:
    for rows, width, units in ((TERMS, 1, 1), (1, TERMS, 1), (1, 1, TERMS)):
        for bias in (True, False):
            own = [(units,)] if bias else []
            yield case("FullyConnected", (rows, width), (units, width), *own, num_hidden=units, no_bias=not bias)
        yield case("FullyConnected", (1, rows, width), (units, width), (units,), num_hidden=units, flatten=False)
        for a, b in itertools.product((None, True), repeat=2):
            left, right = ((width, rows) if a else (rows, width)), ((units, width) if b else (width, units))
            yield case("dot", left, right, transpose_a=a, transpose_b=b)
            yield case("batch_dot", (2, *left), (2, *right), transpose_a=a, transpose_b=b)
        yield case("_np_dot", (rows, width), (width, units))
        yield case("_npi_matmul", (rows, width), (width, units))
        yield case("_npi_matmul", (2, rows, width), (2, width, units))
        yield case("_npi_tensordot", (rows, 1, width), (width, units, 1), a_axes_summed=(2,), b_axes_summed=(0,))
        yield case("_npi_tensordot_int_axes", (rows, width), (width, units), axes=1)
    for op in ("dot", "_np_dot"):
        yield case(op, (TERMS,), (TERMS,))
        yield case(op, (2, TERMS), (TERMS,))
        yield case(op, (2, 2, TERMS), (TERMS, 2))
    yield case("_np_dot", (2, TERMS), (2, TERMS, 2))
    for op, more in (("_np_dot", {}), ("_npi_tensordot_int_axes", {"axes": 0})):
        yield case(op, (), (TERMS,), **more)
        yield case(op, (TERMS,), (), **more)
    yield case("_npi_tensordot_int_axes", (TERMS,), (2,), axes=0)
    yield case("_npi_tensordot_int_axes", (2, 64, 64), (64, 64, 2), axes=2)
    for heads, batch in ((1, 1), (2, 2)):
        wide, other = heads * 2, heads * 2 * 2
        size = batch * heads
        for queries, keys in ((1, TERMS), (TERMS, 1)):
            qk, value = "_contrib_interleaved_matmul_encdec_qk", "_contrib_interleaved_matmul_encdec_valatt"
            yield case(qk, (queries, batch, wide), (keys, batch, other), heads=heads)
            yield case(value, (keys, batch, other), (size, queries, keys), heads=heads)
    yield case("_contrib_interleaved_matmul_encdec_qk", (1, 1, TERMS), (1, 1, 2 * TERMS), heads=1)
    yield case("_contrib_interleaved_matmul_encdec_valatt", (1, 1, 2 * TERMS), (1, 1, 1), heads=1)
    yield case("_contrib_interleaved_matmul_selfatt_qk", (TERMS, 1, 3), heads=1)
    yield case("_contrib_interleaved_matmul_selfatt_qk", (1, 1, 3 * TERMS), heads=1)
    yield case("_contrib_interleaved_matmul_selfatt_valatt", (TERMS, 1, 3), (1, TERMS, TERMS), heads=1)
    yield case("_contrib_interleaved_matmul_selfatt_valatt", (1, 1, 3 * TERMS), (1, 1, 1), heads=1)


def recurrent() -> Iterator[Case]:
    for mode, gates in (("rnn_relu", 1), ("rnn_tanh", 1), ("lstm", 4), ("gru", 3)):
        # Many steps of rnn_relu leave float16's range.
        for steps, batch, width in ((1, TERMS, 1), (1, 1, TERMS), *([] if mode == "rnn_relu" else [(64, 64, 1)])):
            states = [(1, batch, 1)] * (1 + (mode == "lstm"))
            size = gates * (width + 1 + 2)
            # Small weights: tanh is not near 1, where rounding would take its slope.
            weights = Input((size,), 0.125 / width)
            yield case("RNN", (steps, batch, width), weights, *states, mode=mode, state_size=1, num_layers=1)


BROADCASTING = [f"broadcast_{kind}" for kind in ("add", "sub", "mul", "maximum", "minimum")]
BROADCASTING += [f"_npi_{kind}" for kind in ("add", "subtract", "multiply", "copysign")]
LARGE_AND_SMALL = (
    ((TERMS,), (1,)),
    ((TERMS, 3), (1, 3)),
    ((3, TERMS), (3, 1)),
    ((64, 64), (1, 1)),
    ((2, TERMS, 3), (2, 1, 3)),
    ((64, 2, 64), (1, 2, 1)),
    ((TERMS, 1), (1, 3)),
)


def broadcasts() -> Iterator[Case]:
    for op, (large, small) in itertools.product(BROADCASTING, LARGE_AND_SMALL):
        yield case(op, large, small)
        yield case(op, small, large)
    for op in filter(lambda op: op.startswith("_npi"), BROADCASTING):
        yield case(op, (TERMS,), ())
        yield case(op, (2, TERMS), (TERMS,))
        yield case(op, (TERMS, 2), (2,))
    for large, small in LARGE_AND_SMALL[:-1]:
        axes = [i for i, (a, b) in enumerate(zip(large, small)) if a != b]
        sizes = tuple(large[i] for i in axes)
        yield case("broadcast_axis", small, axis=tuple(axes), size=sizes)
        yield case("broadcast_to", small, shape=large)
        yield case("_npi_broadcast_to", small, shape=large)
        yield case("broadcast_like", small, fixed(ONE, *large))
        yield case("tile", small, reps=tuple(a // b for a, b in zip(large, small)))
        yield case("_npi_where", fixed(ONE, *large), small, small)
        yield case("_npi_where", fixed(ONE, *small), large, small)
        yield case("_npi_where_rscalar", fixed(ONE, *large), small, scalar=0)
        yield case("_npi_where_lscalar", fixed(0.0, *large), small, scalar=0)
    yield case("_npi_broadcast_to", (2,), shape=(TERMS, 2))
    yield case("tile", (2,), reps=(TERMS, 1))
    yield case("repeat", (2,), repeats=TERMS)
    for axis in (0, 1):
        yield case("repeat", (2, 3), repeats=TERMS, axis=axis)
    for shape, slopes in (((TERMS, 1), 1), ((TERMS, 2), 2), ((64, 2, 8, 8), 2), ((64, 2, 8, 8), 1)):
        yield case("LeakyReLU", Input(shape, -ONE), (slopes,), act_type="prelu")


def copies() -> Iterator[Case]:
    for axes, width in ((2, 4095), (2, 63), (3, 15)):
        one = (1,) * axes
        for mode in ("constant", "edge", "reflect"):
            room = one if mode != "reflect" else (width + 1,) + (2,) * (axes - 1)
            if axes == 2 and width == 4095:
                by, room = (0, 0, 0, 0, width, 0, 0, 0), room if mode == "reflect" else one
            else:
                by, room = (0, 0, 0, 0, *(width, 0) * axes), (width + 1,) * axes if mode == "reflect" else one
            yield case("Pad", (1, 1, *room), mode=mode, pad_width=by, constant_value=0)
    for mode in ("constant", "edge", "reflect", "symmetric", "maximum", "minimum"):
        yield case("_npi_pad", (2, 2), mode=mode, pad_width=((64, 64), (64, 64)))


def selections() -> Iterator[Case]:
    where = fixed(0.0, TERMS)
    for axis, shape in ((0, (2, 3)), (1, (3, 2)), (-1, (2, 2))):
        for mode in ("clip", "wrap"):
            yield case("take", shape, where, axis=axis, mode=mode)
    yield case("gather_nd", (2, 3), fixed(0.0, 1, TERMS))
    yield case("gather_nd", (2, 3), fixed(0.0, 2, TERMS))
    yield case("scatter_nd", (TERMS, 3), fixed(0.0, 1, TERMS), shape=(2, 3))
    yield case("pick", (TERMS, 2), fixed(0.0, TERMS), axis=1)
    yield case("batch_take", (TERMS, 2), Input((TERMS,), 0.0, False, "int32"))
    yield case("_contrib_index_copy", (2, 3), Input((2,), (0, 0), False), (2, 3))
    yield case("where", fixed(ONE, TERMS), (TERMS, 2), (TERMS, 2))
    for axis in (None, 0, 1):
        for op in ("max", "min"):
            yield case(op, (TERMS, 2) if axis == 0 else (2, TERMS), axis=axis)
            shape = (TERMS, 2) if axis == 0 else (2, TERMS)
            yield case(f"_np_{op}", shape, **({} if axis is None else {"axis": (axis,)}))


def peak(*shape: int) -> Input:
    """Halves, and 2 in the middle, which is the maximum of every window."""
    values = np.full(shape, 0.5, "float32")
    values[tuple(side // 2 for side in shape)] = 2
    return Input(shape, values.tolist())


def poolings() -> Iterator[Case]:
    for dims, off, kind in itertools.product(SIDES, (None, True), ("max", "avg", "sum", "lp")):
        side, one = SIDES[dims], (1,) * dims
        image, kernel = (2 * side - 1,) * dims, (side,) * dims
        data = (peak if kind == "max" else ones)(1, 1, *image)
        common: dict[str, Any] = {"pool_type": kind, "cudnn_off": off, "p_value": 2 if kind == "lp" else None}
        yield case("Pooling", data, **common, kernel=kernel)
        yield case("Pooling", (1, 1, *kernel), **common, kernel=one, global_pool=True)
        yield case("Pooling", (1, 1, *kernel), **common, global_pool=True)
        if kind in ("sum", "lp"):
            continue
        for step in (2, side // 2, side):
            yield case("Pooling", data, **common, kernel=kernel, stride=(step,) * dims)
        for convention in ("full", "same") if dims == 1 else ("full",):
            yield case("Pooling", data, **common, kernel=kernel, pooling_convention=convention)
        for counted in (True, False):
            half = (side // 2,) * dims
            yield case("Pooling", data, **common, kernel=kernel, pad=half, count_include_pad=counted)
        layout = {1: "NWC", 2: "NHWC", 3: "NDHWC"}[dims]
        yield case("Pooling", (peak if kind == "max" else ones)(1, *image, 1), **common, kernel=kernel, layout=layout)
        yield case("Pooling", (1, *kernel, 1), **common, kernel=one, global_pool=True, layout=layout)


def resamplings() -> Iterator[Case]:
    image = (1, 1, 64, 64)
    for size in ((1, 1), (2, 3), (64, 64)):
        yield case("_contrib_AdaptiveAvgPooling2D", image, output_size=size)
    yield case("_contrib_AdaptiveAvgPooling2D", (1, 1, 1, 1), output_size=(64, 64))
    yield case("_contrib_AdaptiveAvgPooling2D", image)
    for corners in (True, False):
        yield case("_contrib_BilinearResize2D", (1, 1, 2, 2), height=128, width=128, align_corners=corners)
    yield case("_contrib_BilinearResize2D", (1, 1, 2, 2), mode="odd_scale", scale_height=64, scale_width=64)
    for scale in (2, 3, 64):
        yield case("UpSampling", (1, 1, 1, 1), scale=scale, sample_type="nearest", num_args=1)
    yield case("UpSampling", (1, 1, 2, 2), (1, 1, 1, 1), scale=32, sample_type="nearest", num_args=2)
    for kernel, room in (((64, 64), 127), ((2, 2), 65)):
        yield case("im2col", (1, 1, room, room), kernel=kernel)


def norms() -> Iterator[Case]:
    shapes = ((TERMS, 2), 1), ((64, 2, 8, 8), 1), ((64, 8, 8, 2), 3), ((64, 2, 64), 1), ((16, 2, 4, 8, 8), 1)
    for shape, axis in shapes:
        vector = (2,)
        states = (Input(vector, 0.0, False), Input(vector, 1.0, False))
        for off, known, fix in itertools.product((None, True), (None, True), (False, True)):
            more = {"cudnn_off": off, "use_global_stats": known, "fix_gamma": fix, "axis": axis}
            yield case("BatchNorm", shape, vector, vector, *states, **more)


def adds() -> Iterator[Case]:
    for count in (2, 3, 4, 5, 8, 16, TERMS):
        yield case("add_n", *[(2,)] * count, num_args=count)


def name_of(each: Case) -> str:
    count = len(each.inputs)
    return each.name if count < 10 else f"{count} inputs, {each._replace(inputs=each.inputs[:1]).name}"


def by_rule(each: Case) -> str:
    """Why a rule keeps a case in FP32 whatever kernel computes it, or ``""``."""
    kind, reason = rule_of(each.op).resolve(each.attrs, "float16")
    return reason if kind is Kind.FULL else ""


def judged(each: Case) -> str:
    """The verdict, with a reason or figures."""
    if reason := by_rule(each):
        return f"{FP32}: {reason}"
    with mx.util.np_shape(each.op.startswith("_np")):
        plain = each.graph()
        policy = Policy("float16", params="float32", low_ops=[each.op])
        plans = {device: decide(plain, policy, device) for device in ("gpu", "cpu")}
        decision = plans["gpu"].decisions["op"]
        if not decision.low:
            return f"{FP32}: {decision.reason}"
        rng = np.random.RandomState(0)
        values = [spec.values(rng) for spec in each.inputs]
        try:
            shapes = [out.shape for out in run(plain, each, mx.gpu(), values, None)[0]]
            heads = [np.ones(shape, "float32") for shape in shapes]
            wanted = run(plain, each, mx.gpu(), values, heads)
        except mx.MXNetError as error:
            return f"{REFUSED}: {reason_of(error)}"
        found = run(low_graph(plain, plans["gpu"], "gpu")[0], each, mx.gpu(), values, heads)
        off = largest(found, wanted)
        try:
            emulated = run(low_graph(plain, plans["cpu"], "cpu")[0], each, mx.cpu(), values, heads)
            beside = f"{largest(emulated, wanted):.1e}"
        except mx.MXNetError:  # the CPU's FP32 kernel lacks a layout, or so many channels
            beside = "refused"
    return f"{SHORT if off > ROUNDINGS else WHOLE}: {off:.1e}, emulated {beside}"


def largest(found: Any, wanted: Any) -> float:
    """The largest difference of outputs and gradients, of the largest value of each array."""
    pairs = [(f, w) for way in zip(found, wanted) for f, w in zip(*way) if w.size]
    return max(float(np.abs(f - w).max() / max(np.abs(w).max(), 1e-30)) if (f != w).any() else 0.0 for f, w in pairs)


def judged_apart(todo: list[Case]) -> list[str]:
    """The verdicts of cases, in a process of their own; fewer if it ended early."""
    there, here = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(here, "w", buffering=1) as told:
            for each in todo:
                signal.alarm(SECONDS)
                told.write(json.dumps(judged(each)) + "\n")
        os._exit(0)
    os.close(here)
    with os.fdopen(there) as read_from:
        found = [json.loads(line) for line in read_from if line.endswith("\n")]
    os.waitpid(child, 0)
    return found


def main(operators: list[str], results: Path = RESULTS, at_once: int = 30) -> None:
    known: dict[str, dict[str, str]] = {op: v for op, v in read(results).items() if op not in operators}
    found: dict[str, dict[str, str]] = {}
    todo = []
    for each in cases():
        verdict = known.get(each.op, {}).get(name_of(each))
        if verdict is None or verdict.startswith((SHORT, ENDED)):
            todo.append(each)
        else:
            found.setdefault(each.op, {})[name_of(each)] = verdict
    while todo:
        part = todo[:at_once]
        verdicts = judged_apart(part)
        if len(verdicts) < len(part):
            verdicts.append(f"{ENDED}: the process ended")
        for each, verdict in zip(part, verdicts):
            found.setdefault(each.op, {})[name_of(each)] = verdict
            if verdict.startswith((SHORT, ENDED)):
                print(f"{each.op} {name_of(each)}: {verdict}", flush=True)
        todo = todo[len(verdicts) :]
        write(results, {op: dict(sorted(verdicts.items())) for op, verdicts in sorted(found.items())}, depth=2)


if __name__ == "__main__":
    os.environ.update(MXNET_USE_FUSION="0", MXNET_SUBGRAPH_BACKEND="NONE", MXNET_ENGINE_TYPE="NaiveEngine")
    os.environ["MXMP_WITH"] = "rounded_products,rounded_outputs"
    main(sys.argv[1:])
