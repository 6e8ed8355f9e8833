"""Resuming a Module: states, masters, counters and scale come from the file, hyper-parameters from the caller."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from twins import MASTERS, array, assert_close

import mxmp

# MXNet's own Module leaves the states file open when it reads it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning"),
]
POLICIES = {"float16": "float16", "float16 masters": MASTERS, "bfloat16": "bfloat16"}
SHAPES = {"fc1_weight": (5, 6), "fc1_bias": (5,), "fc2_weight": (3, 5), "fc2_bias": (3,)}


def symbol():
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, name="fc1")
    x = mx.sym.FullyConnected(mx.sym.tanh(x), num_hidden=3, name="fc2")
    return mx.sym.SoftmaxOutput(x, mx.sym.var("softmax_label"), name="softmax")


def ready(module, optimizer="sgd", **options):
    module.bind([("data", (4, 6))], [("softmax_label", (4,))])
    if not module.params_initialized:
        rng = np.random.RandomState(0)
        start = {name: mx.nd.array(rng.uniform(-0.5, 0.5, shape)) for name, shape in SHAPES.items()}
        module.init_params(arg_params=start, aux_params={})
    module.init_optimizer(optimizer=optimizer, optimizer_params={"rescale_grad": 0.25, **options})
    return module


def kind_of(policy):
    return (mx.mod.Module, {}) if policy is None else (mxmp.Module, {"policy": policy, "loss_scale": 1024.0})


def train(module, steps):
    """The learning rate of every step."""
    rates = []
    for i in steps:
        module.forward_backward(mx.io.DataBatch([array(i, 4, 6)], [mx.nd.array([0, 1, 2, i % 3])]))
        module.update()
        optimizer = module._optimizer
        rates.append(optimizer.lr_scheduler(optimizer.num_update) if optimizer.lr_scheduler else optimizer.lr)
    return rates


def weights(module):
    return [module.get_params()[0][name].asnumpy() for name in SHAPES]


def resumed(policy, folder, before, after, steps=4, **more):
    """Trains, saves, loads with other options, trains on: rates of the second part, updates of its weights."""
    kind, mixed = kind_of(policy)
    module = ready(kind(symbol(), **mixed), **before())
    train(module, range(steps))
    prefix = str(folder / ("full" if policy is None else "low"))
    module.save_checkpoint(prefix, 1, save_optimizer_states=True)
    module = ready(kind.load(prefix, 1, load_optimizer_states=True, **mixed), **after())
    start = weights(module)
    rates = train(module, range(steps, 2 * steps))
    return rates, [new - old for new, old in zip(weights(module), start)]


def multi(base, steps, **more):
    return mx.lr_scheduler.MultiFactorScheduler(step=steps, factor=0.1, base_lr=base, **more)


def sgd(rate=0.5, **more):
    return {"learning_rate": rate, "momentum": 0.9, **more}


CASES = {
    "another learning rate": (lambda: sgd(0.5), lambda: sgd(0.05)),
    "another momentum": (lambda: sgd(), lambda: sgd(momentum=0.5)),
    "another weight decay": (lambda: sgd(wd=0.0), lambda: sgd(wd=0.1)),
    "another clipping": (lambda: sgd(), lambda: sgd(clip_gradient=0.01)),
    # As MXNet's example/image-classification/common/fit.py builds it after 4 of 6 and 7 steps: what is left.
    "a relative schedule": (lambda: sgd(lr_scheduler=multi(0.5, [6, 7])), lambda: sgd(lr_scheduler=multi(0.5, [2, 3]))),
    "a relative schedule, some decays over": (
        lambda: sgd(lr_scheduler=multi(0.5, [2, 6])),
        lambda: sgd(lr_scheduler=multi(0.05, [2])),
    ),
    "a schedule of one kind, then another": (
        lambda: sgd(lr_scheduler=multi(0.5, [2])),
        lambda: sgd(lr_scheduler=mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.2)),
    ),
    "no schedule, then one": (lambda: sgd(), lambda: sgd(lr_scheduler=multi(0.5, [5, 7]))),
    "a schedule, then none": (lambda: sgd(lr_scheduler=multi(0.5, [2])), lambda: sgd(0.1)),
    "the same schedule": (lambda: sgd(lr_scheduler=multi(0.5, [2, 5])), lambda: sgd(lr_scheduler=multi(0.5, [2, 5]))),
    "a lower base rate": (lambda: sgd(lr_scheduler=multi(0.5, [6])), lambda: sgd(lr_scheduler=multi(0.02, [6]))),
    "Adam's betas": (
        lambda: {"optimizer": "adam", "learning_rate": 0.01},
        lambda: {"optimizer": "adam", "learning_rate": 0.001, "beta1": 0.5, "beta2": 0.9},
    ),
}


def plain(folder, before, after, begin):
    """MXNet's own Module, which starts counting at ``begin`` again; mxmp has the counts from the file."""
    module = ready(mx.mod.Module(symbol()), **before())
    train(module, range(4))
    prefix = str(folder / "full")
    module.save_checkpoint(prefix, 1, save_optimizer_states=True)
    module = mx.mod.Module.load(prefix, 1, load_optimizer_states=True)
    ready(module, begin_num_update=begin, **after())
    start = weights(module)
    rates = train(module, range(4, 8))
    return rates, [new - old for new, old in zip(weights(module), start)]


# Whether a schedule counts from the file's step on or from the resume is the caller's meaning: these say it.
BEGINS = {"the same schedule": (4,), "a relative schedule": (0,), "a relative schedule, some decays over": (0,)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_caller_passes_now_wins(policy, case, tmp_path):
    before, after = CASES[case]
    rates, found = resumed(POLICIES[policy], tmp_path, before, after)
    begins = BEGINS.get(case, (0, 4) if "schedule" in case or "base" in case else (4,))
    expected = [plain(tmp_path, before, after, begin) for begin in begins]
    assert rates in [each for each, _ in expected]
    assert_close(found, next(deltas for each, deltas in expected if each == rates), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_that_is_resumed_with_its_own_options_is_the_uninterrupted_one_to_the_bit(policy, tmp_path):
    def options():
        return sgd(lr_scheduler=multi(0.5, [2, 5]))

    kind, mixed = kind_of(POLICIES[policy])
    whole = ready(kind(symbol(), **mixed), **options())
    rates = train(whole, range(8))
    first = ready(kind(symbol(), **mixed), **options())
    train(first, range(4))
    first.save_checkpoint(str(tmp_path / "net"), 1, save_optimizer_states=True)
    second = ready(kind.load(str(tmp_path / "net"), 1, load_optimizer_states=True, **mixed), **options())
    assert train(second, range(4, 8)) == rates[4:]
    for a, b in zip(weights(whole), weights(second)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("door", ["module", "trainer"])
def test_a_trainer_keeps_what_gluon_keeps_and_a_module_what_a_module_keeps(door, tmp_path):
    """``gluon.Trainer.load_states`` takes the file's hyper-parameters; ``Module`` the caller's. Each as MXNet's."""
    if door == "module":
        rates, _ = resumed("float16", tmp_path, lambda: sgd(0.5), lambda: sgd(0.05))
        assert rates == [0.05] * 4
        return
    from mxnet import gluon

    found = []
    for kind in (gluon.Trainer, mxmp.Trainer):
        param = gluon.Parameter("w", shape=(2,))
        param.initialize()
        more = {"update_on_kvstore": False} if kind is gluon.Trainer else {}
        first = kind([param], "sgd", {"learning_rate": 0.5, "momentum": 0.9}, **more)
        with mx.autograd.record():
            loss = (param.data() ** 2).sum()
        loss.backward() if kind is gluon.Trainer else first.backward(loss)
        first.step(1)
        first.save_states(str(tmp_path / kind.__module__))
        param.initialize(force_reinit=True)
        second = kind([param], "sgd", {"learning_rate": 0.05, "momentum": 0.5}, **more)
        with mx.autograd.record():
            loss = (param.data() ** 2).sum()
        loss.backward() if kind is gluon.Trainer else second.backward(loss)
        second.step(1)
        second.load_states(str(tmp_path / kind.__module__))
        found.append((second.learning_rate, second.optimizer.momentum))
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_buckets_module_resumes_with_the_caller_s_rate(policy, tmp_path):
    def make(rate):
        module = mxmp.BucketingModule(
            lambda key: (symbol(), ["data"], ["softmax_label"]), 6, policy=POLICIES[policy], loss_scale=1024.0
        )
        return ready(module, **sgd(rate))

    first = make(0.5)
    for i in range(3):
        batch = mx.io.DataBatch(
            [array(i, 4, 6)],
            [mx.nd.array([0, 1, 2, 0])],
            bucket_key=6,
            provide_data=[("data", (4, 6))],
            provide_label=[("softmax_label", (4,))],
        )
        first.forward_backward(batch)
        first.update()
    first.save_optimizer_states(str(tmp_path / "s"))
    second = make(0.05)
    second.load_optimizer_states(str(tmp_path / "s"))
    assert second._curr_module._optimizer.lr == 0.05
    assert second._curr_module._optimizer.num_update == 3
