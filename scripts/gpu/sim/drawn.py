"""Graphs of about ten operators, drawn by a seed: mxmp's emulation against the machine code of MXNet's kernels.

    bash scripts/simgpu.sh python -m gpu.sim.drawn 10000    # into drawn.json; goes on where it was ended

An error is in units in the last place of a tensor's largest value. Two sums in another order may round to two different
numbers, which a norm or the kink of a relu makes a large difference of; and some gradients, as of a bias in front of a
norm, are zero but for roundings. So each graph that disagrees runs again on the CPU with FP32's last bits changed, and
counts as ill-conditioned where every error is within four times what that changes, or what FP32 differs by on a GPU.
What is left runs once more with gradients changed by a rounding where a GPU has one more: slopes of pointwise
operators, gradients of sums that read float16, and the product in hard_sigmoid.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Tuple

import mxnet as mx
import numpy as np
from support.operators.errors import largest_error
from support.results import read, write

import mxmp
from mxmp.precision.casts import is_ours
from mxmp.precision.graph import Entry, Graph, Node

S = mx.sym
LIMIT = 2.0  # units in the last place
CHANCE = 4.0  # the controls may miss the largest change by as much
CONTROLS, LAST_BITS, ROUNDING = 24, 2.0**-21, 2.0**-11
ROUNDED = frozenset(["sigmoid", "tanh", "softsign", "erf", "hard_sigmoid", "LeakyReLU", "square", "sqrt", "sum"])
EXPLAINED = ("ill-conditioned", "rounded more often", "ends its process")
ROWS = 4
RESULTS = Path(__file__).with_name("drawn.json")
Shape = Tuple[int, ...]
Tensor = Tuple[Any, Shape]  # a Symbol and its shape
Arrays = Dict[str, np.ndarray]


class Drawn:
    """One graph: its ``symbol``, and the ``values`` of all that it reads."""

    def __init__(self, seed: int) -> None:
        self._draw, self._rng = random.Random(seed), np.random.RandomState(seed)
        self.values: Arrays = {}
        self.kinds: list[str] = []
        self._shapes: dict[str, Shape] = {}
        self._made: list[Tensor] = []
        self._count = 0
        tensor = self._start()
        for _ in range(self._draw.randint(7, 11)):
            self._made.append(tensor)
            kind = self._draw.choice(FOUR_AXES if len(tensor[1]) == 4 else TWO_AXES)
            self.kinds.append(kind.__name__.strip("_"))
            tensor = kind(self, *tensor)
        heads = [tensor[0]]
        if self._draw.random() < 0.3:
            heads.append(self._draw.choice(self._made)[0])
        symbol = S.Group([S.identity(head, name=f"out{i}") for i, head in enumerate(heads)])
        self.symbol = symbol
        self._fill(symbol)

    def var(self, shape: Shape, role: str) -> Any:
        self._count += 1
        name = f"{role}{self._count}"
        self._shapes[name] = shape
        return S.Variable(name)

    def name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def choice(self, *options: Any) -> Any:
        return self._draw.choice(options)

    def earlier(self, shape: Shape, same: Callable[[Shape], bool]) -> Tensor:
        """Another tensor of a fitting shape, or a new variable of this one."""
        found = [made for made in self._made if same(made[1])]
        return self._draw.choice(found) if found else (self.var(shape, "data"), shape)

    def _start(self) -> Tensor:
        if self._draw.random() < 0.25:
            index, rows, width = self.var((ROWS,), "index"), 11, self.choice(8, 12)
            rows_read = S.Embedding(index, input_dim=rows, output_dim=width, name=self.name("embed"))
            return _dense(self, rows_read, (ROWS, width))
        if self._draw.random() < 0.3:
            shape: Shape = (ROWS, self.choice(9, 16, 24))
            return _dense(self, self.var(shape, "data"), shape)
        shape = (ROWS, self.choice(3, 4, 8), 6, 6)
        return _convolution(self, self.var(shape, "data"), shape)

    def _fill(self, symbol: Any) -> None:
        given = {name: self._shapes[name] for name in symbol.list_arguments() if name in self._shapes}
        shapes, _, states = symbol.infer_shape(**given)
        for name, shape in zip(symbol.list_arguments(), shapes):
            value = self._rng.randn(*shape)
            if name.startswith("index"):
                value = self._rng.randint(0, 11, shape)
            elif name.endswith("gamma"):
                value = 1 + value / 4
            elif not name.startswith("data"):
                value = value / max(int(np.prod(shape[1:])), 1) ** 0.5
            self.values[name] = value.astype("float16").astype("float32")
        for name, shape in zip(symbol.list_auxiliary_states(), states):
            self.values[name] = np.full(shape, float("var" in name), "float32")

    def run(self, ctx: mx.Context, control: int = 0, *, rounded: bool = False, full: bool = False) -> Arrays:
        """The outputs and the gradients, by name. Each ``control`` but 0 changes FP32's last bits at the casts.

        ``rounded``: it also changes gradients, by the rounding that a GPU has more. ``full``: in FP32.
        """
        mx.random.seed(control)
        policy = mxmp.Policy("float16", params="float32")
        low = self.symbol if full else mxmp.cast_symbol(self.symbol, policy, ctx=ctx)
        return self.results(_changed(low, control, rounded) if control else low, ctx)

    def results(self, symbol: Any, ctx: mx.Context) -> Arrays:
        """The same of a Symbol with this one's arguments."""
        names = symbol.list_arguments()
        arguments = {name: mx.nd.array(self.values[name], ctx=ctx) for name in names}
        trained = [name for name in names if not name.startswith("index")]
        gradients = {name: mx.nd.zeros(self.values[name].shape, ctx=ctx) for name in trained}
        states = {name: mx.nd.array(self.values[name], ctx=ctx) for name in symbol.list_auxiliary_states()}
        requests = {name: "write" if name in gradients else "null" for name in names}
        executor = symbol.bind(ctx, arguments, gradients, requests, states)
        outputs = executor.forward(is_train=True)
        executor.backward(heads_for(outputs))
        found = {f"output {i}": out.asnumpy() for i, out in enumerate(outputs)}
        return {**found, **{f"gradient of {name}": gradients[name].asnumpy() for name in trained}}

    def judged(self) -> tuple[str, float, str]:
        """``"agrees"``, why not, or ``"differs"``; the largest error; and where it is."""
        emulated, computed = self.run(mx.cpu()), self.run(mx.gpu())
        errors = {name: largest_error(computed[name], emulated[name]) for name in emulated}
        worst = max(errors, key=lambda name: errors[name])
        if errors[worst] <= LIMIT:
            return "agrees", errors[worst], worst
        moved = dict.fromkeys(errors, 0.0)
        for reason, other, own in self._moved(emulated):
            moved = {name: max(most, largest_error(other[name], own[name])) for name, most in moved.items()}
            if all(error <= max(LIMIT, CHANCE * moved[name]) for name, error in errors.items()):
                return reason, errors[worst], worst
        return "differs", errors[worst], worst

    def _moved(self, emulated: Arrays) -> Iterator[tuple[str, Arrays, Arrays]]:
        """Pairs of runs that differ in last bits only, FP32 on both devices, and runs with more roundings."""
        for number in range(1, CONTROLS + 1):
            yield "ill-conditioned", self.run(mx.cpu(), number), emulated
        yield "ill-conditioned", self.run(mx.gpu(), full=True), self.run(mx.cpu(), full=True)
        for number in range(1, CONTROLS + 1):
            yield "rounded more often", self.run(mx.cpu(), number, rounded=True), emulated


def heads_for(outputs: list) -> list:
    """The gradients of the outputs: float16 has them."""
    rng = np.random.RandomState(1)
    heads = [rng.randn(*out.shape).astype("float16").astype("float32") for out in outputs]
    return [mx.nd.array(head, ctx=out.context) for head, out in zip(heads, outputs)]


def _changed(symbol: Any, seed: int, rounded: bool) -> Any:
    """A Symbol that multiplies what each cast reads and returns in FP32 by 1 and a bit, as another order may.

    ``rounded``: also the gradients of inputs of ``ROUNDED``, element by element, by 1 and up to a rounding.
    """
    draw, graph = random.Random(seed), Graph.from_symbol(symbol)

    def nearly(entry: Entry, name: str) -> Entry:
        factor = 1 + draw.choice([-1, 1]) * LAST_BITS
        return Entry(Node("_mul_scalar", name, {"scalar": f"{factor:.12f}"}, [entry]))

    casts = [node for node in graph.nodes() if node.op == "Cast" and is_ours(node)]
    readers = graph.consumers()
    for cast in casts:
        if cast.attrs["dtype"] == "float16":
            cast.rewire(0, nearly(cast.inputs[0], f"{cast.name}_before"))
        elif not cast.inputs[0].node.is_variable:
            behind = nearly(Entry(cast), f"{cast.name}_behind")
            for user, position in readers.get(Entry(cast), ()):
                user.rewire(position, behind)
    for node in [each for each in graph.nodes() if rounded and each.op in ROUNDED]:
        node.rewire(0, _rounded_again(node.inputs[0], node.name, values=node.op == "hard_sigmoid"))
    return graph.to_symbol()


def _rounded_again(entry: Entry, name: str, *, values: bool) -> Entry:
    """What has other gradients, and with ``values`` other values, than ``entry``, by up to a rounding."""
    limits = {"low": f"{-ROUNDING:.12f}", "high": f"{ROUNDING:.12f}"}
    drawn = Entry(Node("_random_uniform_like", f"{name}_drawn", limits, [entry]))
    share = Entry(Node("BlockGrad", f"{name}_share", {}, [drawn]))
    change = Entry(Node("elemwise_mul", f"{name}_change", {}, [entry, share]))
    if not values:
        fixed = Entry(Node("BlockGrad", f"{name}_fixed", {}, [change]))
        change = Entry(Node("elemwise_sub", f"{name}_slope", {}, [change, fixed]))
    return Entry(Node("elemwise_add", f"{name}_changed", {}, [entry, change]))


# -- Operators: from a tensor to a tensor -----------------------------------------------------------


def _convolution(g: Drawn, x: Any, shape: Shape) -> Tensor:
    kernel, filters, bias = g.choice(1, 3), g.choice(4, 8), g.choice(True, False)
    group = g.choice(1, 1, 2) if shape[1] % 2 == 0 else 1
    attrs = {"kernel": (kernel,) * 2, "pad": (kernel // 2,) * 2, "num_group": group, "no_bias": not bias}
    y = S.Convolution(x, num_filter=filters, name=g.name("conv"), **attrs)
    return y, (ROWS, filters, *shape[2:])


def _strided(g: Drawn, x: Any, shape: Shape) -> Tensor:
    if shape[2] < 4:
        return _convolution(g, x, shape)
    y = S.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1), stride=(2, 2), name=g.name("conv"))
    return y, (ROWS, 8, *((side + 1) // 2 for side in shape[2:]))


def _deconvolution(g: Drawn, x: Any, shape: Shape) -> Tensor:
    if shape[2] > 6:
        return _strided(g, x, shape)
    y = S.Deconvolution(x, num_filter=4, kernel=(2, 2), stride=(2, 2), no_bias=g.choice(True, False), name=g.name("de"))
    return y, (ROWS, 4, *(2 * side for side in shape[2:]))


def _dense(g: Drawn, x: Any, shape: Shape) -> Tensor:
    units = g.choice(6, 12, 17)
    return S.FullyConnected(x, num_hidden=units, no_bias=g.choice(True, False), name=g.name("fc")), (ROWS, units)


def _dot(g: Drawn, x: Any, shape: Shape) -> Tensor:
    units = g.choice(5, 12)
    return S.dot(x, g.var((shape[1], units), "weight") * (1 / shape[1] ** 0.5)), (ROWS, units)


POINTWISE: dict[str, Callable[[Any], Any]] = {
    "relu": S.relu,
    "activation": lambda x: S.Activation(x, act_type="relu"),
    "tanh": S.tanh,
    "act_tanh": lambda x: S.Activation(x, act_type="tanh"),
    "sigmoid": S.sigmoid,
    "act_sigmoid": lambda x: S.Activation(x, act_type="sigmoid"),
    "softsign": S.softsign,
    "softrelu": lambda x: S.Activation(x, act_type="softrelu"),
    "leaky": lambda x: S.LeakyReLU(x, act_type="leaky", slope=0.1),
    "gelu": lambda x: S.LeakyReLU(x, act_type="gelu"),
    "elu": lambda x: S.LeakyReLU(x, act_type="elu", slope=1.0),
    "erf": S.erf,
    "hard_sigmoid": S.hard_sigmoid,
    "clip": lambda x: S.clip(x, a_min=-0.7, a_max=1.3),
    "times": lambda x: x * 0.3,
    "plus": lambda x: x + 1.1,
    "minus": lambda x: 0.7 - x,
    "over": lambda x: x / 3,
    "abs": S.abs,
    "square": S.square,
    "exp": lambda x: S.exp(S.clip(x, a_min=-2, a_max=2)),
    "root": lambda x: S.sqrt(S.abs(x) + 0.5),
    "swish": lambda x: x * S.sigmoid(x),
}


def _pointwise(g: Drawn, x: Any, shape: Shape) -> Tensor:
    name = g.choice(*POINTWISE)
    g.kinds[-1:] = [name]
    return POINTWISE[name](x), shape


def _binary(g: Drawn, x: Any, shape: Shape) -> Tensor:
    other, _ = g.earlier(shape, lambda each: each == shape)
    kind = g.choice(S.elemwise_add, S.elemwise_sub, S.elemwise_mul, S.broadcast_add, S.broadcast_maximum)
    return kind(x, other), shape


def _sum_of_five(g: Drawn, x: Any, shape: Shape) -> Tensor:
    others = [g.earlier(shape, lambda each: each == shape)[0] for _ in range(4)]
    return S.add_n(x, *others), shape


def _broadcast(g: Drawn, x: Any, shape: Shape) -> Tensor:
    kind = g.choice(S.broadcast_add, S.broadcast_mul, S.broadcast_sub, S.broadcast_minimum)
    axes = [(1, *shape[1:]), (shape[0], *(1,) * (len(shape) - 1)), (1, shape[1], *(1,) * (len(shape) - 2))]
    return kind(x, g.var(g.choice(*axes), "data")), shape


def _excited(g: Drawn, x: Any, shape: Shape) -> Tensor:
    """Squeeze and excitation."""
    pooled = S.Pooling(x, kernel=(1, 1), global_pool=True, pool_type="avg")
    gate = S.sigmoid(S.Convolution(pooled, kernel=(1, 1), num_filter=shape[1], name=g.name("gate")))
    return S.broadcast_mul(x, gate), shape


def _pooling(g: Drawn, x: Any, shape: Shape) -> Tensor:
    return S.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type=g.choice("max", "avg")), shape


def _halved(g: Drawn, x: Any, shape: Shape) -> Tensor:
    if shape[2] % 2:
        return _pooling(g, x, shape)
    y = S.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type=g.choice("max", "avg"))
    return y, (*shape[:2], *(side // 2 for side in shape[2:]))


def _batch_norm(g: Drawn, x: Any, shape: Shape) -> Tensor:
    return S.BatchNorm(x, fix_gamma=g.choice(True, False), name=g.name("norm")), shape


def _layer_norm(g: Drawn, x: Any, shape: Shape) -> Tensor:
    return S.LayerNorm(x, name=g.name("norm")), shape


def _softmax(g: Drawn, x: Any, shape: Shape) -> Tensor:
    return g.choice(S.softmax, S.log_softmax)(x, axis=1), shape


def _flat(g: Drawn, x: Any, shape: Shape) -> Tensor:
    return S.Flatten(x), (ROWS, int(np.prod(shape[1:])))


def _transposed(g: Drawn, x: Any, shape: Shape) -> Tensor:
    return S.transpose(x, axes=(0, 1, 3, 2)), (*shape[:2], shape[3], shape[2])


def _image(g: Drawn, x: Any, shape: Shape) -> Tensor:
    units = 4 * 4 * 4
    y = S.FullyConnected(x, num_hidden=units, name=g.name("fc"))
    return S.Reshape(y, shape=(0, 4, 4, 4)), (ROWS, 4, 4, 4)


def _joined(g: Drawn, x: Any, shape: Shape) -> Tensor:
    if shape[1] > 40:
        return _cut(g, x, shape)
    other, their = g.earlier(shape, lambda each: len(each) == len(shape) and each[2:] == shape[2:] and each[1] < 40)
    return S.Concat(x, other, dim=1), (ROWS, shape[1] + their[1], *shape[2:])


def _cut(g: Drawn, x: Any, shape: Shape) -> Tensor:
    if shape[1] < 4:
        return _joined(g, x, shape)
    return S.slice_axis(x, axis=1, begin=1, end=shape[1] - 1), (ROWS, shape[1] - 2, *shape[2:])


def _padded(g: Drawn, x: Any, shape: Shape) -> Tensor:
    if shape[2] > 6 or min(shape[2:]) < 2:
        return _halved(g, x, shape)
    y = S.Pad(x, mode=g.choice("edge", "reflect", "constant"), pad_width=(0, 0, 0, 0, 1, 1, 1, 1), constant_value=0.3)
    return y, (*shape[:2], *(side + 2 for side in shape[2:]))


def _enlarged(g: Drawn, x: Any, shape: Shape) -> Tensor:
    if shape[2] > 5:
        return _halved(g, x, shape)
    y = S.UpSampling(x, scale=2, sample_type="nearest", num_args=1)
    return y, (*shape[:2], *(2 * side for side in shape[2:]))


def _reduced(g: Drawn, x: Any, shape: Shape) -> Tensor:
    kind = g.choice(S.sum, S.mean, S.max)
    return S.broadcast_sub(x, kind(x, axis=1, keepdims=True) * 0.2), shape


def _attention(g: Drawn, x: Any, shape: Shape) -> Tensor:
    keys = S.FullyConnected(x, num_hidden=12, name=g.name("fc"))
    queries, others = S.Reshape(keys, shape=(2, -1, 12)), S.Reshape(x, shape=(2, -1, shape[1]))
    scores = S.softmax(S.batch_dot(queries, queries, transpose_b=True) * 0.3)
    return S.Reshape(S.batch_dot(scores, others), shape=(ROWS, shape[1])), shape


EVERY = [_pointwise, _pointwise, _pointwise, _pointwise, _binary, _sum_of_five, _broadcast, _joined, _cut, _reduced]
FOUR_AXES = [*EVERY, _convolution, _convolution, _strided, _deconvolution, _batch_norm, _batch_norm, _pooling, _halved]
FOUR_AXES += [_excited, _softmax, _flat, _transposed, _padded, _enlarged]
TWO_AXES = [*EVERY, _dense, _dense, _dense, _dot, _layer_norm, _softmax, _image, _attention]


def judged_apart(first: int, last: int) -> list[list[str]]:
    """Verdict and details of the graphs from ``first``, judged in a process of their own; fewer if it ended early."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(write, "w") as told:
            for seed in range(first, last):
                graph = Drawn(seed)
                try:
                    verdict, error, where = graph.judged()
                except (mx.MXNetError, ValueError) as raised:
                    verdict, error, where = "fails", 0.0, str(raised).strip().splitlines()[-1][:150]
                told.write(json.dumps([verdict, f"{error:.3g} in {where}: {' '.join(graph.kinds)}"]) + "\n")
                told.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        found = [json.loads(line) for line in told if line.endswith("\n")]
    os.waitpid(child, 0)
    return found


def main(last: int, results: Path = RESULTS, at_once: int = 20) -> None:
    """Judge the graphs that ``results`` has not, ``at_once`` in a process, and add them; first again what differs."""
    found = {"graphs": 0, "agrees": 0, **{kind: [] for kind in EXPLAINED}, **read(results)}
    again = sorted(map(int, [*found.pop("differs", {}), *found.pop("fails", {})]))
    todo = [range(seed, seed + 1) for seed in again]
    todo += [range(first, min(first + at_once, last)) for first in range(found["graphs"], last, at_once)]
    while todo:
        seeds = todo.pop(0)
        judged = judged_apart(seeds.start, seeds.stop)
        if len(judged) < len(seeds):
            judged.append(["ends its process", ""])
            todo.insert(0, seeds[len(judged) :])
        for seed, (verdict, details) in zip(seeds, judged):
            found["graphs"] += seed not in again
            if verdict == "agrees":
                found["agrees"] += 1
                continue
            print(f"{seed}: {verdict} {details}", flush=True)
            if verdict in ("differs", "fails"):
                found.setdefault(verdict, {})[str(seed)] = details
            else:
                found[verdict] = sorted([*found[verdict], seed])
        if seeds.stop > max(again, default=-1):
            write(results, found)


if __name__ == "__main__":
    os.environ.update(MXNET_USE_FUSION="0", MXMP_WITH="rounded_products,rounded_outputs")
    main(int(sys.argv[1]), *map(Path, sys.argv[2:3]))
