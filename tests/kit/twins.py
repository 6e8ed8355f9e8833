"""What FP32 learns, and what a low-precision twin learns; or a refusal in place of wrong numbers."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

SCALE = 1024.0
LOSS = gluon.loss.L2Loss()
MASTERS = mxmp.Policy("float16", params="float16")
POLICIES = {"float16": "float16", "float16 masters": MASTERS, "bfloat16": "bfloat16"}
# Relative to the largest element: a rounding of every activation, weight and gradient on the way.
TOLERANCE = {"float16": 0.02, "float16 masters": 0.02, "bfloat16": 0.15, "float32": 1e-5}
FLAGS = {
    "not hybridized": None,
    "hybridized": {},
    "static": {"static_alloc": True, "static_shape": True},
}


def seeded(net: gluon.Block, ctx: Any = None, seed: int = 1, scale: float = 0.5) -> gluon.Block:
    """``net`` with the same weights for the same seed; shapes must be known."""
    net.initialize(ctx=ctx)
    rng = np.random.RandomState(seed)
    for name, param in net.collect_params().items():
        if name.endswith(("running_var", "running_mean")):
            continue
        param.set_data(mx.nd.array(rng.uniform(-scale, scale, param.shape).astype("float32")))
    return net


def array(seed: int, *shape: int, ctx: Any = None) -> mx.nd.NDArray:
    return mx.nd.array(np.random.RandomState(1000 + seed).randn(*shape).astype("float32"), ctx=ctx)


def value(param: gluon.Parameter, device: int = 0) -> np.ndarray:
    """FP32, from the master where there is one."""
    arrays = param.masters() if hasattr(param, "masters") else param.list_data()
    return arrays[device].asnumpy()


def values(params: Any, device: int = 0) -> list[np.ndarray]:
    """Host copies of all weights, of a net or of parameters."""
    found = params.collect_params() if isinstance(params, gluon.Block) else params
    return [value(p, device) for p in found.values()]


def updates(params: Any, run: Callable[[], Any]) -> list[np.ndarray]:
    """What ``run`` adds to every parameter, in order."""
    before = values(params)
    run()
    return [new - old for old, new in zip(before, values(params))]


def sequence(*layers: gluon.Block, **kwargs: Any) -> nn.HybridSequential:
    net = nn.HybridSequential(**kwargs)
    with net.name_scope():
        net.add(*layers)
    return net


def convert(policy: Any, *nets: gluon.Block, flags: dict[str, bool] | None = None) -> None:
    """Convert the nets, unless ``policy`` is None, and hybridize them, unless ``flags`` are."""
    for net in nets:
        if policy is not None:
            mxmp.convert(net, policy)
        if flags is not None:
            net.hybridize(**flags)


def trainer_of(
    policy: Any, *nets: gluon.Block, scale: Any = SCALE, optimizer: str = "sgd", **options: Any
) -> gluon.Trainer:
    """mxmp's Trainer of these nets for a policy; MXNet's own, which knows no loss scale, for None."""
    params = list({id(param): param for net in nets for param in net.collect_params().values()}.values())
    options.setdefault("learning_rate", 0.5)
    if policy is None:
        return gluon.Trainer(params, optimizer, options, update_on_kvstore=False)
    return mxmp.Trainer(params, optimizer, options, loss_scale=scale)


def loss_of(*nets: gluon.Block, seed: int = 0) -> mx.nd.NDArray:
    """A recorded loss, of what the last net gives for a batch of 4 that runs through all of them."""
    with autograd.record():
        x = array(seed, 4, 6)
        for net in nets:
            x = net(x)
        return LOSS(x, mx.nd.ones_like(x))


def backward(trainer: gluon.Trainer, loss: Any, **kwargs: Any) -> None:
    (trainer if isinstance(trainer, mxmp.Trainer) else autograd).backward(loss, **kwargs)


def step(trainer: gluon.Trainer, loss: Any, batch_size: int = 4, **kwargs: Any) -> None:
    backward(trainer, loss)
    trainer.step(batch_size, **kwargs)


def train(
    net: gluon.Block, program: Iterable[int | Callable[[], Any]], trainer: gluon.Trainer, size: int = 4, **kwargs: Any
) -> list[np.ndarray]:
    """A step for each of ``program``, a function that records a loss or a seed of ``loss_of``; returns the updates."""

    def run() -> None:
        for each in program:
            step(trainer, each() if callable(each) else loss_of(net, seed=each), size, **kwargs)

    return updates(net, run)


def assert_close(found: Iterable[np.ndarray], expected: Iterable[np.ndarray], policy: str = "float16") -> None:
    """Every array within the dtype's tolerance of its FP32 twin, and neither empty nor zero."""
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for i, (low, full) in enumerate(zip(found, expected)):
        largest = np.abs(full).max()
        assert largest > 0, f"array {i}: the FP32 twin learned nothing"
        assert np.isfinite(low).all(), f"array {i}"
        error = np.abs(low - full).max() / largest
        ratio = np.abs(low).max() / largest
        assert error <= TOLERANCE[policy], f"array {i}: off by {error:.3g} of FP32's; {ratio:.4g} times as large"


def assert_same(found: Any, expected: Any) -> None:
    """Arrays of both kinds, in lists or by name, are equal bit for bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = [found[name] for name in expected], expected.values()
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(
            *(each.asnumpy() if isinstance(each, mx.nd.NDArray) else each for each in (one, other))
        )


def equal_or_refused(
    run: Callable[[], Any], check: Callable[[Any], None], *, saying: str | tuple[str, ...] = ()
) -> None:
    """``check`` holds for what ``run`` gives, or mxmp refuses ``run`` with an error that says all of ``saying``."""
    refused = None
    try:
        found = run()
    except mx.MXNetError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        refused = str(error)
    if refused is None:
        check(found)
        return
    for words in [saying] if isinstance(saying, str) else saying:
        assert words in refused, f"refused, but {refused!r} does not say {words!r}"
