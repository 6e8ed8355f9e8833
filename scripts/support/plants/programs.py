# ruff: noqa: N803
"""More plants: what real programs do, by the rules alone or with ``low_ops``, and what overflows or vanishes.

Some rules may come to keep what is planted in FP32: those plants have a plan that keeps it low. ``SPOILED`` and
``BROKEN`` are the ones whose loss or gradients are inf or NaN in low precision, which ``blame`` is asked about.
"""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
import numpy as np

from .kinds import BOTH, L2, PLANTED, ROWS, Plant, bce, binary, logits, mean, plain, scalar

BF16, F16 = ("bfloat16",), ("float16",)
FIRST, LAST = "hidden_fwd", "out_fwd"


def column(low: float, high: float) -> Callable:
    """Raw data: one column of whole numbers from ``low`` to ``high``, and three that are normalized."""

    def data(rng: np.random.RandomState) -> tuple[list, list]:
        raw = rng.randint(low, high, (4 * ROWS, 1)).astype(float)
        x = np.concatenate([raw, rng.normal(size=(4 * ROWS, 3))], axis=1)
        return [x], [np.tanh((raw - (low + high) / 2) / (high - low) * 4) + x[:, 1:2]]

    return data


def dense(F, net, x, *_):
    return net.out(net.hidden(x))


def raw(name: str, low: float, high: float, dtypes: tuple = BF16, body: Callable = dense) -> Plant:
    def centered(net: Any) -> None:
        """Let the bias take the mean of the raw column off, as training does."""
        weight = net.hidden.weight.data()
        weight[:, 0] *= 8 / (high - low)
        net.hidden.bias.set_data(-weight[:, 0] * (low + high) / 2)

    return Plant("raw digits", name, body, column(low, high), L2, dtypes, 1, where=FIRST, prepare=centered)


def pairs(rng: np.random.RandomState) -> tuple[list, list]:
    a = rng.normal(1000, 40, (4 * ROWS, 4))
    x = np.concatenate([a, a + rng.normal(size=a.shape)], axis=1)
    return [x], [np.tanh(x[:, 4:5] - x[:, :1])]


def differences(net) -> None:
    pattern = np.zeros(net.hidden.weight.shape)
    for unit in range(16):
        pattern[unit, unit % 4], pattern[unit, unit % 4 + 4] = -1, 1
    net.hidden.weight.set_data(mx.nd.array(pattern))


def times(factor: float, layer: str = "hidden") -> Callable:
    def prepare(net: Any) -> None:
        weight = getattr(net, layer).weight
        weight.set_data(weight.data() * factor)

    return prepare


def waves(function: str, layer: str = "more") -> Callable:
    return lambda F, net, x: net.out(getattr(F, function)(getattr(net, layer)(x)))


def wide(rng: np.random.RandomState) -> tuple[list, list]:
    return [rng.normal(size=(ROWS, 8))], [rng.normal(size=(ROWS, 16))]


def near_ties(net: Any) -> None:
    """Let the layer return numbers that differ in their last digits, as scores do late in training."""
    net.more.weight.set_data(net.more.weight.data() * 0.004)
    net.more.bias.set_data(mx.nd.full((16,), 5))


def _gate(F, net, x):
    scores = net.more(x)
    return F.broadcast_mul(F.one_hot(F.argmax(scores, axis=1), 16), net.hidden(x)) * 4


def _rank(F, net, x):
    scores = net.more(x)
    return F.topk(scores, axis=1, k=4, ret_typ="mask") * net.hidden(x)


def _peaks(F, net, x):
    heat = net.more(x)
    return heat * F.broadcast_equal(heat, F.max(heat, axis=1, keepdims=True))


def _squared(F, net, x):
    return F.log(F.sum(F.square(net.out(net.hidden(x)) * 90, name=PLANTED), axis=1, keepdims=True) + 1)


def _offset(value: float) -> Callable:
    return lambda F, net, x: net.out(scalar(F, "plus", net.hidden(x), value) - value)


def _mean_off(F, net, x):
    hidden = scalar(F, "plus", net.hidden(x), 2000.0)
    return net.out(F.broadcast_sub(hidden, F.mean(hidden, axis=1, keepdims=True)))


def _series(F, net, x):
    warm = F.Convolution(x, F.ones((4, 1, 3)) * 0.3, no_bias=True, kernel=(3,), num_filter=4, name=PLANTED)
    return net.out((warm - 259).flatten())


def _temperatures(rng: np.random.RandomState) -> tuple[list, list]:
    return [rng.normal(288, 0.6, (ROWS, 1, 12))], [rng.normal(size=(ROWS, 4))]


# -- what vanishes in front of a logarithm, a root or a division: inf or NaN in float16 ------------------


def p(F, layer, x, shift: float = -8.0):
    return F.sigmoid(layer(x) + shift)


def columns(F, x, number: int) -> list:
    return [F.slice_axis(x, axis=1, begin=at, end=at + 1) for at in range(number)]


def _product(F, net, x):
    return F.elemwise_mul(p(F, net.out, net.hidden(x)), p(F, net.out, net.more(x), -9), name=PLANTED)


def _matrix(F, net, x):
    scores = F.softmax(net.out(net.hidden(x)) * 9)
    return F.dot(scores, F.eye(4), name=PLANTED)


def _connected(F, net, x):
    scores = F.softmax(net.out(net.hidden(x)) * 9)
    return F.FullyConnected(scores, F.eye(4), num_hidden=4, no_bias=True, name=PLANTED)


def _eight(F, net, x):
    rows = columns(F, F.sigmoid(net.more(x) - 3), 8)
    total = rows[0]
    for row in rows[1:-1]:
        total = total * row
    return F.elemwise_mul(total, rows[-1], name=PLANTED)


def _stick(F, net, x):
    rest, found = None, []
    for row in columns(F, F.sigmoid(net.more(x) * 2 + 1), 16):
        found.append(row if rest is None else F.elemwise_mul(row, rest, name=PLANTED if len(found) == 15 else None))
        rest = 1 - row if rest is None else rest * (1 - row)
    return found[-1]


def _hidden_markov(F, net, x):
    state = F.softmax(net.out(net.hidden(x)) * 20)
    for step in range(6):
        seen = F.sigmoid(net.out(net.more(x)) - 4)
        state = F.dot(state * seen, F.eye(4) * 0.9 + 0.02, **({"name": PLANTED} if step == 5 else {}))
    return state


def _small(F, net, x):
    return scalar(F, "mul", F.exp(net.out(net.hidden(x))), 1e-9)


def _squares(F, net, x):
    return F.square(net.out(net.hidden(x)) * 1e-5, name=PLANTED)


def _power(F, net, x):
    return F._internal._power_scalar(p(F, net.out, net.hidden(x), -2), scalar=12.0, name=PLANTED)


def _mixed(F, net, x):
    return F.broadcast_mul(F.softmax(net.out(net.hidden(x)) * 9), p(F, net.out, net.more(x), -9), name=PLANTED)


READERS = {
    "log": lambda F, u: -F.log(u),
    "rsqrt": lambda F, u: F.log(F.rsqrt(u)),
    "reciprocal": lambda F, u: F.log(1 / u),
    "division": lambda F, u: F.log(F.broadcast_div(F.ones_like(u), u)),
}


def spoiled(name: str, made: Callable, reader: str) -> Plant:
    def body(F, net, x):
        return READERS[reader](F, made(F, net, x))

    return Plant("vanishes", f"{reader} of {name}", body, plain, mean, F16)


VANISHING = {
    "a product": _product,
    "a dot": _matrix,
    "a dense layer": _connected,
    "eight sigmoids": _eight,
    "stick-breaking": _stick,
    "a hidden Markov model": _hidden_markov,
    "a small factor": _small,
    "squares": _squares,
    "a power": _power,
    "a mixture": _mixed,
}
SPOILED = [spoiled(name, made, reader) for name, made in VANISHING.items() for reader in ("log", "rsqrt")]
SPOILED += [spoiled("a dot", _matrix, "reciprocal"), spoiled("a product", _product, "division")]


# -- positions, offsets, states and raw columns whose loss of digits ends in inf or NaN ------------------


def broken(
    kind: str,
    name: str,
    body: Callable,
    data: Callable = plain,
    dtypes: tuple = F16,
    where: str = PLANTED,
    prepare: Callable | None = None,
) -> Plant:
    return Plant(kind, name, body, data, mean, dtypes, where=where, prepare=prepare)


def ids(low: int, high: int) -> Callable:
    """Rows of ids that are one apart, beside features."""

    def data(rng: np.random.RandomState) -> tuple[list, list]:
        first = rng.randint(low, high, ROWS) * 2 + 1
        return [rng.normal(size=(ROWS, 8)), np.stack([first, first + 1], axis=1)], [rng.normal(size=(ROWS, 4))]

    return data


def _angles(multiply: Callable) -> Callable:
    def body(F, net, x, positions):
        table = F.reshape(F.arange(1, 5) * 37, shape=(1, 4))
        first = F.slice_axis(positions, axis=1, begin=0, end=1)
        return net.out(net.hidden(x)) * F.sin(multiply(F, first, table))

    return body


def _gap(F, net, x, both):
    earlier, later = columns(F, both, 2)
    gap = F.elemwise_sub(later, earlier, name=PLANTED)
    return F.broadcast_mul(net.out(net.hidden(x)), F.reciprocal(gap))


def _off_again(much: float, small: float, end: Callable) -> Callable:
    def body(F, net, x):
        shifted = scalar(F, "plus", net.out(net.hidden(x)) * small, much)
        return end(F, shifted)

    return body


def _spread(F, x):
    away = F.broadcast_sub(x, F.mean(x, axis=1, keepdims=True))
    return F.log(F.rsqrt(F.mean(F.square(away), axis=1)))


def _state(steps: int, change: Callable, end: Callable = lambda F, x: F.log(x)) -> Callable:
    """The ``steps`` operators ``planted0``, ``planted1``, ... change a state; ``change(F, state, x, name)`` is one."""

    def body(F, net, x):
        inside = F.sigmoid(net.out(net.hidden(x)) * 0.1)
        state = inside
        for step in range(steps):
            state = change(F, state, inside, f"{PLANTED}{step}")
        return end(F, state)

    return body


def _scaled(factor: float) -> Callable:
    return lambda F, state, x, name: scalar(F, "mul", state, factor, name)


def near(rng: np.random.RandomState) -> tuple[list, list]:
    """Two columns near 1000 that are nearly the same, four times."""
    a = rng.normal(1000, 40, (ROWS, 4))
    return [np.concatenate([a, a + rng.normal(0, 0.1, a.shape)], axis=1)], [rng.normal(size=(ROWS, 4))]


def _columns_apart(reader: str) -> Callable:
    def body(F, net, x):
        apart = getattr(F, reader)(F.abs(net.more(x)))
        return F.broadcast_add(net.out(F.tanh(net.hidden(x))), F.mean(apart, axis=1, keepdims=True))

    return body


def take_off(net) -> None:
    pattern = np.zeros((16, 8))
    for unit in range(16):
        pattern[unit, unit % 4], pattern[unit, unit % 4 + 4] = -1, 1
    net.more.weight.set_data(mx.nd.array(pattern))


BROKEN = [
    broken("positions", "sin of a table", _angles(lambda F, a, b: F.broadcast_mul(a, b, name=PLANTED)), ids(500, 1500)),
    broken("positions", "sin of a dot", _angles(lambda F, a, b: F.dot(a, b, name=PLANTED)), ids(500, 1500)),
    broken("positions", "division by a gap", _gap, ids(1500, 3000), BOTH),
    broken("offset", "log, 1013", _off_again(1013.0, 0.1, lambda F, x: F.log(F.abs(x - 1013)))),
    broken("offset", "rsqrt, 3072", _off_again(3072.0, 0.1, lambda F, x: F.rsqrt(F.abs(x - 3072))), dtypes=BOTH),
    broken("offset", "spread", _off_again(3000.0, 0.01, _spread), dtypes=BOTH),
    broken("state", "growth", _state(48, _scaled(1.3), lambda F, x: F.square(x * 1e-5))),
    broken("state", "decay", _state(24, _scaled(0.4))),
    broken("state", "gates", _state(32, lambda F, state, x, name: F.elemwise_mul(state, x, name=name))),
    broken(
        "raw digits",
        "above 65504",
        lambda F, net, x: net.out(F.tanh(net.hidden(x))),
        lambda rng: ([rng.normal(480000, 10, (ROWS, 8))], [rng.normal(size=(ROWS, 4))]),
        where=FIRST,
        prepare=times(1e-4),
    ),
    broken("raw digits", "log", _columns_apart("log"), near, BOTH, "more_fwd", take_off),
    broken("raw digits", "rsqrt of it", _columns_apart("rsqrt"), near, BOTH, "more_fwd", take_off),
]


def large(
    name: str, body: Callable, prepare: Callable | None = None, where: str = PLANTED, data: Callable = plain
) -> Plant:
    return Plant("above 65504", name, body, data, mean, F16, where=where, prepare=prepare)


def low_op(op: str, name: str, body: Callable, data: Callable = plain, loss: Any = L2, dtypes: tuple = BOTH) -> Plant:
    return Plant("low_ops", name, body, data, loss, dtypes, low_ops=(op,))


MORE = [
    raw("year", 1995, 2025),
    raw("day", 19000, 19300, BOTH),
    raw("pixel", 1500, 1700),
    raw("kelvin", 280, 296),
    raw("price", 15000, 15100, BOTH),
    raw("altitude", 8800, 8840, BOTH),
    raw("minute", 1380, 1440),
    raw("longitude in seconds", 60000, 60060, BOTH),
    raw("altitude in feet", 29000, 29100, BOTH),
    raw("frame", 5000, 5030, BOTH),
    raw("postal code", 10110, 10180, BOTH),
    raw("hertz", 4400, 4450, BF16),
    raw("house number", 4000, 4100),
    raw("identifier", 30000, 30064, BOTH),
    raw("hour of the era", 480000, 480100, BOTH),
    raw("year beside its square", 2000, 2020, BF16, lambda F, net, x: net.out(F.tanh(net.hidden(x)))),
    raw("reshaped year", 1995, 2025, BF16, lambda F, net, x: net.out(net.hidden(F.Reshape(x, shape=(0, -1))))),
    raw("year beside a sum", 1995, 2025, BF16, lambda F, net, x: net.out(net.hidden(F.concat(x, x * 0.5, dim=1)))),
    raw(
        "a slice with the year",
        1995,
        2025,
        BF16,
        lambda F, net, x: net.out(net.hidden(F.slice_axis(x, axis=1, begin=0, end=3))),
    ),
    Plant("raw digits", "difference of columns", dense, pairs, L2, BOTH, 1, where=FIRST, prepare=differences),
    Plant("raw digits", "series", _series, _temperatures, L2, BF16),
    Plant("waves", "sin of a layer", waves("sin"), plain, L2, BOTH, where="more_fwd", prepare=times(300, "more")),
    Plant("waves", "cos of a layer", waves("cos"), plain, L2, BOTH, where="more_fwd", prepare=times(300, "more")),
    Plant("waves", "sin, omega 40", waves("sin"), plain, L2, BF16, where="more_fwd", prepare=times(40, "more")),
    Plant(
        "waves",
        "Fourier features",
        lambda F, net, x: net.out(F.concat(F.sin(net.more(x)), F.cos(net.more(x)), dim=1)),
        plain,
        L2,
        BOTH,
        where="more_fwd",
        prepare=times(200, "more"),
    ),
    Plant("ties", "argmax gate", _gate, wide, L2, BOTH, 16, where="more_fwd", prepare=near_ties),
    Plant("ties", "top k", _rank, wide, L2, BOTH, 16, where="more_fwd", prepare=near_ties),
    Plant("ties", "peaks", _peaks, wide, L2, BOTH, 16, where="more_fwd", prepare=near_ties),
    Plant("offset", "1013 between layers", _offset(1013.0), plain),
    Plant("offset", "3000 between layers", _offset(3000.0), plain),
    Plant("offset", "mean taken off", _mean_off, plain),
    large("weights", lambda F, net, x: net.out(net.hidden(x)) * 1e-5, times(5e5, "out"), LAST),
    large(
        "input",
        lambda F, net, x: net.out(net.hidden(x) * 1e-5),
        None,
        FIRST,
        lambda rng: ([rng.normal(1e6, 1e6, (ROWS, 8))], [rng.normal(size=(ROWS, 4))]),
    ),
    large("activation", lambda F, net, x: net.out(net.hidden(x) * 1e-6), times(1e6), FIRST),
    large(
        "sum",
        lambda F, net, x: F.sum(F.exp(net.out(net.hidden(x)) + 10), axis=1, name=PLANTED, keepdims=True).log(),
    ),
    large("square", _squared),
    large(
        "product",
        lambda F, net, x: F.log(
            1 + F.abs(F.elemwise_mul(net.out(net.hidden(x)) * 900, net.out(net.hidden(x)) * 900, name=PLANTED))
        ),
    ),
    low_op("sigmoid", "sigmoid", lambda F, net, x: F.sigmoid(logits(net, x, 8), name=PLANTED), binary, bce),
    low_op(
        "sigmoid",
        "sigmoid, focal",
        lambda F, net, x: F.sigmoid(logits(net, x, 12), name=PLANTED),
        binary,
        lambda q, y: -((1 - q + 1e-9).log() * q).mean(axis=1),
    ),
    low_op(
        "softmax",
        "softmax",
        lambda F, net, x: F.log(1 - F.softmax(6 * F.tanh(logits(net, x, 3)), name=PLANTED) + 1e-9),
        plain,
        mean,
    ),
    low_op("tanh", "tanh", lambda F, net, x: F.arctanh(F.tanh(logits(net, x, 3), name=PLANTED) * 0.99999), plain, mean),
    low_op(
        "erf",
        "erf",
        lambda F, net, x: F.log(1 - F.erf(F.abs(logits(net, x, 2)), name=PLANTED) + 1e-6),
        plain,
        mean,
        dtypes=F16,
    ),
    low_op("exp", "exp", lambda F, net, x: F.log(F.exp(logits(net, x, 4) + 10, name=PLANTED)), plain, mean, F16),
    low_op("cos", "cos", lambda F, net, x: (1 - F.cos(0.02 * logits(net, x), name=PLANTED)) * 1e4, dtypes=F16),
    low_op(
        "sin",
        "sin",
        lambda F, net, x: net.out(
            net.hidden(F.sin(F._internal._mul_scalar(x, scalar=37.0, name="angle"), name=PLANTED))
        ),
        lambda rng: ([rng.uniform(0, 60, (ROWS, 8))], [rng.normal(size=(ROWS, 4))]),
        dtypes=F16,
    ),
    low_op(
        "gammaln",
        "gammaln",
        lambda F, net, x, n: F.gammaln(n + F.relu(logits(net, x)) + 0.5, name=PLANTED) - F.gammaln(n + 1),
        lambda rng: ([rng.normal(size=(ROWS, 8)), rng.randint(50, 400, (ROWS, 4))], []),
        mean,
        dtypes=F16,
    ),
    low_op(
        "sum",
        "sum",
        lambda F, net, x: net.out(net.hidden(F.broadcast_sub(F.sum(x, axis=1, name=PLANTED), F.ones((1,)) * 2000))),
        lambda rng: ([rng.normal(40, 0.1, (ROWS, 50, 4))], [rng.normal(size=(ROWS, 4))]),
        dtypes=F16,
    ),
    low_op(
        "mean",
        "mean",
        lambda F, net, x: net.out(net.hidden(F.broadcast_sub(F.mean(x, axis=1, name=PLANTED), F.ones((1,)) * 40) * 50)),
        lambda rng: ([rng.normal(40, 0.1, (ROWS, 50, 4))], [rng.normal(size=(ROWS, 4))]),
        dtypes=F16,
    ),
    *SPOILED,
]
