"""``scaler.loss_scale = 64``, at any moment: gradients that are there keep their scale, and the update is FP32's."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from kit.modules import batch, bound, mlp
from kit.twins import loss_of, seeded, sequence
from mxnet.gluon import nn

import mxmp
from mxmp.step.ledger import group_of

SCALERS = {
    "static": lambda: mxmp.StaticLossScaler(1024.0),
    "dynamic": lambda: mxmp.DynamicLossScaler(1024.0, growth_interval=2),
    "adaptive": lambda: mxmp.AdaptiveLossScaler(1024.0),
}


def dense():
    return seeded(sequence(nn.Dense(4, in_units=6, activation="tanh"), nn.Dense(2, in_units=4), prefix="n_"))


def test_a_copy_between_backward_and_step_has_no_gradients_and_so_the_new_scale():
    """As in plain MXNet, a copy's parameters have gradients once they are asked for anew."""
    net = mxmp.convert(dense())
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=mxmp.DynamicLossScaler(1024.0))
    trainer.backward(loss_of(net, seed=0))
    trainer.scaler.loss_scale = 4.0
    twin, other = copy.deepcopy((trainer, net))
    assert (twin.loss_scale, trainer.loss_scale) == (4.0, 1024.0)
    trainer.step(4)
    third = mxmp.convert(dense())
    # The copy does not wait in front of this one.
    mxmp.Trainer(third.collect_params(), "sgd").backward(loss_of(third))
    with pytest.raises(RuntimeError, match="before a scaled backward"):
        twin.step(4)
    assert other


# -- Module -----------------------------------------------------------------------------------------


def module():
    found = bound(mxmp.Module(mlp()))
    found.init_optimizer()
    return found


def test_a_module_s_backward_takes_what_was_set_where_it_overwrites():
    found = module()
    found.forward_backward(batch(0))
    found.scaler.loss_scale = 64.0
    assert found.loss_scale == 2.0**16
    found.forward_backward(batch(0))
    assert found.loss_scale == 64.0


# -- what may be set --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("bad", [0, -1, "64", None, True, float("nan"), float("inf"), 1e-50], ids=str)
def test_what_is_no_scale_is_refused_and_changes_nothing(kind, bad):
    scaler = SCALERS[kind]()
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="loss_scale must be a positive"):
        scaler.loss_scale = bad
    assert scaler.state_dict() == before


def test_the_limits_of_a_scaler_hold():
    scaler = mxmp.DynamicLossScaler(16.0, min_scale=2.0, max_scale=64.0)
    for good in (2, 64, np.float32(3)):
        scaler.loss_scale = good
        assert scaler.loss_scale == good
        assert type(scaler.loss_scale) is float
    for bad in (1, 65):
        with pytest.raises(ValueError, match=f"between min_scale=2 and max_scale=64, got {bad}"):
            scaler.loss_scale = bad
    assert scaler.loss_scale == 3


def test_the_count_of_clean_steps_goes_on():
    scaler = mxmp.DynamicLossScaler(16.0, growth_interval=3)
    scaler.adjust(True)
    scaler.adjust(True)
    scaler.loss_scale = 4.0
    scaler.adjust(True)
    assert scaler.loss_scale == 8.0


def test_an_adaptive_scaler_measures_anew():
    scaler = mxmp.AdaptiveLossScaler(2.0**10, measure_interval=5)
    scaler.note_gradients(0.5, 100.0)
    scaler.adjust(True)
    scaler.note_gradients(0.5, 200.0)
    scaler.adjust(True)
    assert not scaler.measures
    scaler.loss_scale = 2.0**4
    assert scaler.measures
    scaler.adjust(False)  # an overflow of before says nothing of the room at the new scale
    assert scaler.state_dict()["room"] == 2.0**3


def test_no_loss_scaler_and_a_trainer_say_where_a_scale_is_set():
    scaler = mxmp.NoLossScaler()
    with pytest.raises(AttributeError, match=r"scale 1, always.*loss_scale='dynamic'"):
        scaler.loss_scale = 64.0
    assert scaler.loss_scale == 1.0
    for owner in (mxmp.Trainer(dense().collect_params(), "sgd"), module()):
        with pytest.raises(AttributeError, match=r"set \.scaler\.loss_scale = 64"):
            owner.loss_scale = 64
        assert owner.loss_scale == 2.0**16


def test_hints_of_a_scaler_disturb_neither_hasattr_nor_copies():
    scaler = mxmp.DynamicLossScaler()
    assert not any(hasattr(scaler, name) for name in ("get_scale", "update", "step"))
    with pytest.raises(AttributeError, match=r"no attribute 'other'$"):
        scaler.other  # noqa: B018
    assert copy.deepcopy(scaler).state_dict() == scaler.state_dict()


class Equal:
    """A user's own scaler, equal to every other one and without a hash."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    __hash__ = None


def test_scalers_that_compare_equal_are_not_shared():
    scalers = [Equal(), Equal()]
    groups = [group_of(scaler) for scaler in scalers]
    assert groups[0] is not groups[1]
    assert group_of(scalers[0]) is groups[0]
