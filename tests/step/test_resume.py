"""Resuming a Module: states, masters, counters and scale come from the file, hyper-parameters from the caller."""

from __future__ import annotations

import copy
import pickle

import mxnet as mx
import pytest
from kit import modules
from kit.modules import SHAPES, bound, bucketing, mlp, weights
from kit.twins import POLICIES, assert_close, assert_same, step
from mxnet import gluon

import mxmp

# MXNet's own Module leaves the states file open when it reads it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning"),
]


def ready(module, optimizer="sgd", **options):
    bound(module).init_optimizer(optimizer=optimizer, optimizer_params={"rescale_grad": 0.25, **options})
    return module


def kind_of(policy):
    return (mx.mod.Module, {}) if policy is None else (mxmp.Module, {"policy": policy, "loss_scale": 1024.0})


def train(module, steps):
    """The learning rate of every step."""
    rates = []
    for i in steps:
        modules.train(module, [i])
        optimizer = module._optimizer
        rates.append(optimizer.lr_scheduler(optimizer.num_update) if optimizer.lr_scheduler else optimizer.lr)
    return rates


def resumed(policy, folder, before, after, **more):
    """Trains, saves, loads with other options, trains on: rates of the second part, updates of its weights."""
    kind, mixed = kind_of(policy)
    module = ready(kind(mlp(), **mixed), **before())
    train(module, range(4))
    prefix = str(folder / ("full" if policy is None else "low"))
    module.save_checkpoint(prefix, 1, save_optimizer_states=True)
    module = ready(kind.load(prefix, 1, load_optimizer_states=True, **mixed), **{**more, **after()})
    start = weights(module)
    rates = train(module, range(4, 8))
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
    "an absolute schedule, with begin_num_update": (
        lambda: sgd(lr_scheduler=multi(0.5, [2, 5])),
        lambda: sgd(0.3, lr_scheduler=multi(0.3, [2, 5]), begin_num_update=4),
    ),
    "what is derived from an argument": (
        lambda: {"optimizer": "adagrad", "learning_rate": 0.1, "eps": 1e-7},
        lambda: {"optimizer": "adagrad", "learning_rate": 0.1, "eps": 1.0},
    ),
    "Adam's betas": (
        lambda: {"optimizer": "adam", "learning_rate": 0.01},
        lambda: {"optimizer": "adam", "learning_rate": 0.001, "beta1": 0.5, "beta2": 0.9},
    ),
}


# Whether a schedule counts from the file's step on or from the resume is the caller's meaning: these say it.
BEGINS = {
    "the same schedule": (4,),
    "an absolute schedule, with begin_num_update": (4,),
    "a relative schedule": (0,),
    "a relative schedule, some decays over": (0,),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_caller_passes_now_wins(policy, case, tmp_path):
    before, after = CASES[case]
    rates, found = resumed(POLICIES[policy], tmp_path, before, after)
    begins = BEGINS.get(case, (0, 4) if "schedule" in case or "base" in case else (4,))
    # MXNet's own Module starts counting at ``begin_num_update`` again; mxmp has the counts from the file.
    expected = [resumed(None, tmp_path, before, after, begin_num_update=begin) for begin in begins]
    assert rates in [each for each, _ in expected]
    assert_close(found, next(deltas for each, deltas in expected if each == rates), policy)


def loss(*params):
    with mx.autograd.record():
        return sum((param.data() ** 2).sum() for param in params)


def parameters():
    found = [gluon.Parameter(name, shape=shape) for name, shape in SHAPES.items()]
    for param in found:
        param.initialize()
    return found


def test_a_trainer_s_hyper_parameters_come_from_the_file_as_gluon_s(tmp_path):
    found = []
    for kind in (gluon.Trainer, mxmp.Trainer):
        param = gluon.Parameter("w", shape=(2,))
        param.initialize()
        more = {"update_on_kvstore": False} if kind is gluon.Trainer else {}
        first = kind([param], "sgd", {"learning_rate": 0.5, "momentum": 0.9}, **more)
        step(first, loss(param), 1)
        first.save_states(str(tmp_path / kind.__module__))
        param.initialize(force_reinit=True)
        second = kind([param], "sgd", {"learning_rate": 0.05, "momentum": 0.5}, **more)
        step(second, loss(param), 1)
        second.load_states(str(tmp_path / kind.__module__))
        found.append((second.learning_rate, second.optimizer.momentum))
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_buckets_module_resumes_with_the_caller_s_rate(policy, tmp_path):
    def make(rate):
        return ready(bucketing(policy=POLICIES[policy], loss_scale=1024.0), **sgd(rate))

    first = make(0.5)
    modules.train(first, range(3))
    first.save_optimizer_states(str(tmp_path / "s"))
    second = make(0.05)
    second.load_optimizer_states(str(tmp_path / "s"))
    assert second._curr_module._optimizer.lr == 0.05
    assert second._curr_module._optimizer.num_update == 3


# -- neighbours -------------------------------------------------------------------------------------


def checkpoint(folder, steps=3, **options):
    module = ready(mxmp.Module(mlp(), loss_scale=1024.0), **options)
    train(module, range(steps))
    module.save_checkpoint(str(folder / "net"), 1, save_optimizer_states=True)
    return module


def continued(folder, **options):
    return ready(mxmp.Module.load(str(folder / "net"), 1, load_optimizer_states=True, loss_scale=1024.0), **options)


@pytest.mark.parametrize(("name", "value"), [("lr", 0.5), ("momentum", 0.9)])
def test_an_argument_that_was_changed_by_hand_is_not_carried_over(name, value, tmp_path):
    module = checkpoint(tmp_path, **sgd(0.5))
    setattr(module._optimizer, name, 0.3)
    module.save_checkpoint(str(tmp_path / "net"), 1, save_optimizer_states=True)
    assert getattr(continued(tmp_path, **sgd(0.5))._optimizer, name) == value


def test_a_run_that_is_resumed_twice_goes_on_in_the_schedule_of_the_first_resume(tmp_path):
    """4 updates, then a script for what is left, which is interrupted after 2 and started again as it is."""
    checkpoint(tmp_path, steps=4, **sgd(lr_scheduler=multi(0.5, [6, 8])))
    once = continued(tmp_path, **sgd(lr_scheduler=multi(0.5, [2, 4])))
    rates = train(once, range(4, 10))
    assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005, 0.005])
    twice = continued(tmp_path, **sgd(lr_scheduler=multi(0.5, [2, 4])))
    train(twice, range(4, 6))
    twice.save_checkpoint(str(tmp_path / "net"), 1, save_optimizer_states=True)
    again = continued(tmp_path, **sgd(lr_scheduler=multi(0.5, [2, 4])))
    assert train(again, range(6, 10)) == rates[2:]
    assert_same(weights(again), weights(once))


def test_a_schedule_that_already_stands_where_the_file_s_does_goes_on(tmp_path):
    """One process, one schedule object."""
    schedule = multi(0.5, [2, 5])
    checkpoint(tmp_path, steps=4, **sgd(lr_scheduler=schedule))
    module = continued(tmp_path, momentum=0.9, lr_scheduler=schedule)
    assert train(module, range(4, 7)) == pytest.approx([0.05, 0.005, 0.005])


def test_a_schedule_from_the_resume_on_can_be_read_and_changed_as_itself(tmp_path):
    checkpoint(tmp_path, **sgd())
    module = continued(tmp_path, **sgd(lr_scheduler=multi(0.5, [20])))
    schedule = module._optimizer.lr_scheduler
    assert (schedule.base_lr, schedule.step) == (0.5, [20])
    schedule.base_lr = 0.25
    assert train(module, range(3, 5)) == [0.25, 0.25]
    assert copy.deepcopy(schedule)(4) == pickle.loads(pickle.dumps(schedule))(4) == 0.25


@pytest.mark.parametrize("again", [False, True], ids=["first run alone", "both runs"])
def test_a_schedule_that_was_set_after_init_optimizer_is_saved_and_resumed(again, tmp_path):
    def module(scheduled):
        found = ready(mxmp.Module(mlp(), policy="bfloat16"))
        if scheduled:
            found._optimizer.lr_scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
        return found

    first = module(True)
    train(first, range(4))
    first.save_optimizer_states(str(tmp_path / "states"))
    expected = train(first, range(4, 8)) if again else [0.01] * 4
    second = module(again)
    second.load_optimizer_states(str(tmp_path / "states"))
    assert train(second, range(4, 8)) == expected


def test_a_trainer_reads_a_resumed_module_s_file_with_its_schedule(tmp_path):
    checkpoint(tmp_path, steps=4, **sgd(lr_scheduler=multi(0.5, [6, 8])))
    module = continued(tmp_path, **sgd(lr_scheduler=multi(0.5, [2, 4])))
    train(module, range(4, 6))
    module.save_optimizer_states(str(tmp_path / "s"))
    trainer = mxmp.Trainer(parameters(), "sgd", {"momentum": 0.9, "lr_scheduler": multi(0.5, [2, 4])}, kvstore=None)
    trainer.load_states(str(tmp_path / "s"))
    scheduler = trainer.optimizer.lr_scheduler
    assert [scheduler(n) for n in (6, 7, 9)] == pytest.approx([0.5, 0.05, 0.005])


def test_a_trainer_of_other_parameters_refuses_a_plain_module_s_file(tmp_path):
    plain = ready(mx.mod.Module(mlp()), **sgd())
    train(plain, range(2))
    plain.save_optimizer_states(str(tmp_path / "s"))
    param = gluon.Parameter("w", shape=(2,))
    param.initialize()
    with pytest.raises(ValueError, match="the states are of other parameters"):
        mxmp.Trainer([param], "sgd", kvstore=None).load_states(str(tmp_path / "s"))


@pytest.mark.parametrize("name", ["sgd", "nadam"])
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_gluon_trainer_s_file_gives_counts_and_states_and_the_caller_the_rest(name, scheduled, tmp_path):
    params = parameters()
    plain = gluon.Trainer(params, name, {"lr_scheduler": multi(0.5, [2])}, kvstore=None)
    for _ in range(3):
        step(plain, loss(*params), 1)
    plain.save_states(str(tmp_path / "s"))
    given = {"learning_rate": 0.2, "lr_scheduler": multi(0.2, [2])} if scheduled else {"learning_rate": 0.1}
    module = ready(mxmp.Module(mlp(), loss_scale=1024.0), optimizer=name, **given)
    module.load_optimizer_states(str(tmp_path / "s"))
    assert module._optimizer.num_update == 3
    assert getattr(module._optimizer, "m_schedule", None) == getattr(plain.optimizer, "m_schedule", None)
    assert train(module, range(3)) == pytest.approx([0.2, 0.2, 0.02] if scheduled else [0.1, 0.1, 0.1])


def test_what_an_optimizer_had_not_accumulated_yet_is_gone_after_loading(tmp_path):
    module = checkpoint(tmp_path, steps=0, optimizer="nadam")
    made = module._optimizer.m_schedule
    train(module, range(2))
    assert module._optimizer.m_schedule != made
    module.load_optimizer_states(str(tmp_path / "net-0001.states"))
    assert module._optimizer.m_schedule == made
