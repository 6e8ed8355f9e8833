"""A probabilistic forecaster with its likelihood in the net, trained on counts with a weekly pattern, and restored.

    python examples/recipes/forecast.py --dtype float16

Data: made here by NumPy (no licence): 240 series of daily counts, such as sales of a shop, with a level, a weekly
pattern and a trend of their own, drawn from a negative binomial. The net is autoregressive: an LSTM reads the scaled
counts of the day before and of one, two and three weeks before, and two layers give mean and dispersion. The net
returns the negative log likelihood in training and the parameters in prediction, as a Python bool says. To predict,
``mxmp.restore`` gives the net back in FP32, and paths are sampled day by day. Metric: quantile loss of the last week,
in % of its counts (0.1, 0.5 and 0.9, as of the M5 competition). Chance: the quantiles of each series' own past.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
from common import Run, parser
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

import mxmp

SERIES, DAYS, WEEK, HIDDEN, BATCH, PATHS, EPOCHS = 240, 91, 7, 32, 24, 100, 40
QUANTILES = (0.1, 0.5, 0.9)
LAGS = (1, 7, 14, 21)  # days


class Forecaster(gluon.HybridBlock):
    """The likelihood of counts, or its parameters, given the counts before."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.lstm = rnn.LSTM(HIDDEN, input_size=1 + len(LAGS))
            self.mean = nn.Dense(1, flatten=False, in_units=HIDDEN)
            self.dispersion = nn.Dense(1, flatten=False, in_units=HIDDEN)

    def hybrid_forward(self, F, before, scale, target, state, likelihood):  # noqa: N803
        """Read arrays of shape (days, batch, ...); ``likelihood`` is a bool, and without it ``target`` is None."""
        level = F.broadcast_like(F.log(scale), before, lhs_axes=(0,), rhs_axes=(0,))
        x = F.concat(F.log1p(F.broadcast_div(before, scale)), level, dim=2)
        x, state = self.lstm(x, state)
        mean = F.broadcast_mul(F.Activation(self.mean(x), "softrelu"), scale)
        alpha = F.Activation(self.dispersion(x), "softrelu") + 1e-3  # the variance is mean + alpha * mean ** 2
        if not likelihood:
            return {"mean": mean, "alpha": alpha, "state": state}
        r = 1 / alpha
        log_p = F.gammaln(target + r) - F.gammaln(target + 1) - F.gammaln(r)
        return -(log_p - r * F.log1p(alpha * mean) + target * F.log(alpha * mean / (1 + alpha * mean) + 1e-10))


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__, EPOCHS).parse_args(arguments)
    counts = series()
    past, future = counts[:, :-WEEK], counts[:, -WEEK:]
    naive = np.quantile(past, QUANTILES, axis=1)[:, :, None]
    run = Run(options, "forecast", "quantile loss, %", round(quantile_loss(naive, future), 2))
    net = train(run, past)
    mxmp.restore(net)
    return run.finish(quantile_loss(np.quantile(paths(net, past), QUANTILES, axis=0), future))


def series() -> np.ndarray:
    """Return counts of shape (SERIES, DAYS), the same in every run."""
    random, days = np.random.RandomState(0), np.arange(DAYS)
    level = np.exp(random.uniform(1, 5, (SERIES, 1)))
    week = np.exp(random.normal(0, 0.5, (SERIES, WEEK)))[:, days % WEEK]
    mean = level * week * np.exp(random.normal(0, 0.4, (SERIES, 1)) * days / DAYS)
    shape = 1 / random.uniform(0.05, 0.3, (SERIES, 1))
    return random.negative_binomial(shape, shape / (shape + mean)).astype("float32")


def train(run: Run, past: np.ndarray) -> Forecaster:
    """Return the trained net."""
    net = Forecaster()
    net.initialize(mx.init.Xavier())
    run.convert(net)
    if run.options.dtype == "float32":
        net.hybridize(False)  # MXNet's own graphs take no bool
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": 1e-2})
    for (batch,) in run.batches(past, size=BATCH):
        target = mx.nd.transpose(batch[:, LAGS[-1] :]).expand_dims(2)
        with autograd.record():
            loss = net(lagged(batch), scale_of(batch), target, net.lstm.begin_state(BATCH), True).mean()
        trainer.backward(loss)
        trainer.step(1)
        run.log(loss)
    return net


def paths(net: Forecaster, past: np.ndarray) -> np.ndarray:
    """Return samples of the week after ``past``, of shape (PATHS, SERIES, WEEK), drawn day by day."""
    random, rows = np.random.RandomState(1), len(past)
    given = mx.nd.array(past)
    state = net(lagged(given), scale_of(given), None, net.lstm.begin_state(rows), False)["state"]
    state = [mx.nd.repeat(array, PATHS, axis=1) for array in state]
    days = mx.nd.repeat(given, PATHS, axis=0)
    scale = scale_of(days)
    for _ in range(WEEK):
        out = net(lagged(days, first=days.shape[1]), scale, None, state, False)
        mean, shape, state = out["mean"].asnumpy() + 1e-6, 1 / out["alpha"].asnumpy(), out["state"]
        drawn = random.negative_binomial(shape, shape / (shape + mean))[0]
        days = mx.nd.concat(days, mx.nd.array(drawn), dim=1)
    return days[:, -WEEK:].asnumpy().reshape(rows, PATHS, WEEK).transpose(1, 0, 2)


def lagged(days: mx.nd.NDArray, first: int = LAGS[-1]) -> mx.nd.NDArray:
    """Return the counts of LAGS before each day from ``first`` on, of shape (days, rows, lags)."""
    count = max(days.shape[1] - first, 1)  # the day after the last one, where ``first`` is that day
    return mx.nd.stack(*(mx.nd.transpose(days[:, first - lag : first - lag + count]) for lag in LAGS), axis=2)


def scale_of(counts: mx.nd.NDArray) -> mx.nd.NDArray:
    """Return the mean of each series, and 1, of shape (1, rows, 1)."""
    return 1 + counts.mean(axis=1).reshape((1, -1, 1))


def quantile_loss(quantiles: np.ndarray, counts: np.ndarray) -> float:
    """Return the mean quantile loss of ``quantiles``, one row for each of QUANTILES, in % of the mean count."""
    errors = [np.maximum(q * (counts - found), (q - 1) * (counts - found)) for q, found in zip(QUANTILES, quantiles)]
    return float(200 * np.mean(errors) / counts.mean())


if __name__ == "__main__":
    main()
