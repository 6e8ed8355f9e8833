"""The slips of a user's first hour: each says what was expected, what was received, and the likely fix."""

from __future__ import annotations

import inspect

import mxnet as mx
import numpy as np
import pytest
from kit.modules import bucketing, mlp
from kit.processes import run_program
from kit.twins import array, assert_same, seeded, values
from mxnet import autograd
from mxnet.contrib import amp
from mxnet.gluon import nn

import mxmp
from mxmp.precision._mxnet import BFLOAT16


def dense():
    return seeded(nn.Dense(3, in_units=6, prefix="d_"))


# -- names of a precision ---------------------------------------------------------------------------

OTHER_NAMES = {
    "float16": ["fp16", "half", "FP16", "mixed_float16", "torch.float16", "float_16", np.float16, np.dtype("float16")],
    "bfloat16": ["bf16", "mixed_bfloat16", "torch.bfloat16", BFLOAT16],
}


# tests/test_policy.py has the other doors.
@pytest.mark.parametrize(
    "takes", [mxmp.Policy, lambda policy: mxmp.convert(dense(), policy)], ids=["Policy", "convert"]
)
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        *((name, rf"did you mean '{meant}'\?$") for meant, names in OTHER_NAMES.items() for name in names),
        *((name, r"FP32 needs no policy.*mxmp\.restore") for name in ("float32", "fp32", np.float32)),
    ],
    ids=lambda each: str(each)[:20],
)
def test_another_library_s_name_of_a_precision_is_answered_with_ours_and_fp32_with_restore(takes, name, answer):
    with pytest.raises(ValueError, match=answer):
        takes(name)


def test_apex_s_levels_are_answered_with_the_policy_string_that_parses():
    for level, params in (("O1", "float32"), ("O2", "float16")):
        with pytest.raises(ValueError, match=rf"did you mean 'float16,params={params}'\?"):
            mxmp.convert(dense(), level)
        assert mxmp.Policy.parse(f"float16,params={params}") == mxmp.Policy(params=params)


@pytest.mark.parametrize("field", ["params", "norm", "output"])
def test_other_fields_suggest_only_what_they_allow(field):
    with pytest.raises(ValueError, match=r"did you mean 'float32'\?"):
        mxmp.Policy(**{field: "fp32"})
    for other in ("bf16", "int8"):
        with pytest.raises(ValueError, match=rf"Policy\({field}='{other}'\): {field} must be one of \[.*\]$"):
            mxmp.Policy(**{field: other})


# -- the path of a plan -----------------------------------------------------------------------------


def dtypes(explanation):
    return [(node.name, node.dtype) for node in explanation.nodes]


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_the_path_of_a_saved_plan_is_taken_wherever_a_plan_is(kind, tmp_path):
    plan = mxmp.tune(mlp(), data=(4, 6), policy=mxmp.Policy(exclude=["fc1"]), measure=False)
    plan.save(tmp_path / "a=b,c.json")
    path = kind(tmp_path / "a=b,c.json")
    want = mxmp.cast_symbol(mlp(), plan).tojson(remove_amp_cast=False)
    assert mxmp.cast_symbol(mlp(), path).tojson(remove_amp_cast=False) == want
    assert dtypes(mxmp.explain(mlp(), policy=path)) == dtypes(mxmp.explain(mlp(), policy=plan))
    for module in (mxmp.Module(mlp(), policy=path), bucketing(policy=path)):
        module.bind([("data", (4, 6))], [("softmax_label", (4,))])
        assert dict(dtypes(mxmp.explain(module)))["fc1"] == "float32"
        assert dict(dtypes(mxmp.explain(module)))["fc2"] == "float16"
    assert mxmp.diagnose.advise(mlp(), policy=path, data=(4, 6))


def test_the_path_of_a_net_s_plan_converts_it(tmp_path):
    net = nn.HybridSequential(prefix="n_")
    with net.name_scope():
        net.add(nn.Dense(5, in_units=6, prefix="a_"), nn.Dense(3, in_units=5, prefix="b_"))
    seeded(net)
    mxmp.tune(net, (4, 6), policy=mxmp.Policy(exclude=["n_a"]), measure=False).save(tmp_path / "plan.json")
    mxmp.convert(net, str(tmp_path / "plan.json"))
    net(array(0, 4, 6))
    assert dict(dtypes(mxmp.explain(net))) == {"n_a_fwd": "float32", "n_b_fwd": "float16"}


def test_a_policy_string_whose_pattern_ends_like_a_file_stays_a_policy_string():
    for text in ("float16,exclude=x.json", "compute=float16,exclude=x.json", "exclude=x.json"):
        with pytest.warns(UserWarning, match="x.json"):
            mxmp.cast_symbol(mlp(), text)


def test_a_plan_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        mxmp.convert(dense(), "missing.json")


def test_tune_says_that_it_makes_plans(tmp_path):
    plan = mxmp.tune(dense(), (4, 6), policy="float16", measure=False)
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json"):
        with pytest.raises(ValueError, match=r"tune makes a Plan.*policy='compute=float16'"):
            mxmp.tune(dense(), (4, 6), policy=given, measure=False)


# -- shapes -----------------------------------------------------------------------------------------


def test_a_shape_may_be_a_list_or_hold_numpy_s_integers():
    want = mxmp.tune(dense(), (4, 6), policy="float16", measure=False)
    for shape in ([4, 6], (np.int64(4), np.int32(6)), list(mx.nd.ones((4, 6)).shape)):
        assert mxmp.tune(dense(), shape, policy="float16", measure=False) == want
    want = mxmp.tune(mlp(), data=(4, 6), measure=False)
    assert mxmp.tune(mlp(), data=[4, 6], measure=False) == want


class Cell(mx.gluon.HybridBlock):
    """Takes a list of states."""

    def __init__(self):
        super().__init__(prefix="c_")
        with self.name_scope():
            self.fc = nn.Dense(6, in_units=6, prefix="fc_")

    def hybrid_forward(self, F, x, states):  # noqa: N803
        return self.fc(x + states[0]) * states[1]


def test_lists_of_arrays_and_of_shapes_are_a_block_s_nested_inputs():
    x = mx.nd.ones((4, 6))
    want = mxmp.tune(seeded(Cell()), x, [x, x], policy="float16", measure=False)
    assert {d.op for d in want.decisions.values()} >= {"FullyConnected"}
    for states in ([(4, 6), (4, 6)], [x, (4, 6)], ((4, 6), x)):
        assert mxmp.tune(seeded(Cell()), (4, 6), states, policy="float16", measure=False) == want


WRONG_SHAPES = {
    "positive integer": [(0, 6), (-1, 6), (None, 6), (8.0, 6.0), (True, 6), (), [], [8, "6"]],
    "a shape is a tuple": ["8,6", 8.5, {"data": (8, 6)}],
    r"NumPy array: give mx\.nd\.array\(x\), or its shape \(8, 6\)": [np.zeros((8, 6))],
}


@pytest.mark.parametrize(
    ("wrong", "hint"), [(wrong, hint) for hint, values in WRONG_SHAPES.items() for wrong in values], ids=str
)
def test_what_is_no_shape_is_answered_with_one(wrong, hint):
    for takes in (
        lambda: mxmp.tune(dense(), wrong, measure=False),
        lambda: mxmp.tune(mlp(), data=wrong, measure=False),
        lambda: mxmp.explain(mlp(), data=wrong),
        lambda: mxmp.diagnose.advise(dense(), wrong),
    ):
        with pytest.raises(ValueError, match=hint):
            takes()


# -- the loss and its scale -------------------------------------------------------------------------


def scaled(scale="dynamic"):
    """A converted net and its trainer."""
    net = mxmp.convert(dense())
    return net, mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, loss_scale=scale)


@pytest.fixture(params=["dynamic", 128, None], ids=str)
def trained(request):
    return scaled(request.param)


def mean(net):
    with autograd.record():
        return net(array(0, 4, 6)).mean()


def step_is_sound(net, trainer):
    """A step after the slip is that of a net that never slipped."""
    other, twin = scaled(trainer.loss_scale)
    for each, of in ((net, trainer), (other, twin)):
        of.backward(mean(each))
        of.step(1)
    assert_same(values(net), values(other))


def unrecorded(net):
    yield net(array(0, 4, 6)).mean()
    loss = mean(net)
    yield loss * 2
    yield loss.detach()
    yield [loss, mx.nd.ones((1,))]


def test_a_loss_outside_record_says_where_it_is_computed_before_anything_is_written(trained):
    net, trainer = trained
    for loss in unrecorded(net):
        for call in (trainer.backward, lambda losses: trainer.scale_loss(losses).__enter__()):
            with pytest.raises(RuntimeError, match=r"not recorded.*with autograd\.record\(\)"):
                call(loss)
    step_is_sound(net, trainer)


def test_a_second_backward_of_one_loss_says_retain_graph(trained):
    net, trainer = trained
    loss = mean(net)
    trainer.backward(loss)
    with pytest.raises(RuntimeError, match=r"earlier backward used its record up \(retain_graph=True"):
        trainer.backward(loss)


def test_a_loss_that_nothing_trained_leads_to_says_so(trained):
    net, trainer = trained
    with autograd.record():
        loss = array(0, 4, 6).mean()
    with pytest.raises(RuntimeError, match=r"nothing of it asks for a gradient \(grad_req='null'\)"):
        trainer.backward(loss)
    for call in (trainer.backward, lambda losses: trainer.scale_loss(losses).__enter__()):
        with pytest.raises(ValueError, match="got an empty list"):
            call([])
    step_is_sound(net, trainer)


class GradScaler:
    """As torch's."""

    def scale(self, outputs):
        return outputs

    def get_scale(self):
        return 1.0

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


WRONG_SCALES = [
    (-1, "positive finite number, got -1$"),
    (0, "positive finite number, got 0$"),
    (float("nan"), "got nan$"),
    (float("inf"), "got inf$"),
    (1e-50, r"FP32's range.*got 1e-50$"),
    ("1024", r"did you mean the number 1024\?"),
    (" 2.5 ", r"did you mean the number 2\.5\?"),
    *((wrong, r"did you mean 'dynamic'\?") for wrong in ("auto", "Dynamic", True)),
    *((wrong, r"did you mean None") for wrong in (False, "None")),
    (mxmp.DynamicLossScaler, r"is an object: DynamicLossScaler\(\.\.\.\)"),
    (GradScaler(), "DynamicLossScaler.*is what torch's GradScaler is"),
    (np.ones(1), "float"),
]


@pytest.mark.parametrize(("wrong", "hint"), WRONG_SCALES, ids=lambda each: str(each)[:20])
def test_what_is_no_loss_scale_is_named_loss_scale_and_answered_with_one(wrong, hint):
    for make in (
        lambda: mxmp.Trainer(dense().collect_params(), "sgd", loss_scale=wrong),
        lambda: mxmp.Module(mlp(), loss_scale=wrong),
        lambda: bucketing(loss_scale=wrong),
    ):
        with pytest.raises(ValueError, match=rf"^loss_scale must be (?s:.)*{hint}"):
            make()


# -- mxnet.contrib.amp ------------------------------------------------------------------------------


def test_amp_scale_loss_is_answered_with_backward():
    net, trainer = scaled()
    with autograd.record():
        loss = net(array(0, 4, 6)).mean()
        with pytest.raises(AttributeError, match=r"call trainer\.backward\(loss\).*trainer\.scale_loss\(loss\)"):
            amp.scale_loss(loss, trainer).__enter__()
    assert not hasattr(trainer, "_amp_loss_scaler")
    assert dict(inspect.getmembers(trainer))["loss_scale"] == trainer.loss_scale
    step_is_sound(net, trainer)


def test_amp_unscale_between_backward_and_step_is_answered_with_unscale():
    """It would divide by nothing, and a gradient clipped behind it would be 65,536 times too large."""
    net, trainer = scaled()
    trainer.backward(mean(net))
    with pytest.raises(TypeError, match=r"call trainer\.unscale\(\)"):
        amp.unscale(trainer)
    trainer.step(1)
    other, twin = scaled()
    twin.backward(mean(other))
    twin.step(1)
    assert_same(values(net), values(other))


AMP_INIT = """
import mxnet as mx
import mxmp
from mxnet.contrib import amp

def refused(call, kind, words):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise SystemExit(f"not refused: {words}")

def dense():
    net = mx.gluon.nn.Dense(3, in_units=6)
    net.initialize()
    return net

before = mxmp.convert(dense())
trainer = mxmp.Trainer(before.collect_params(), "sgd")
refused(lambda: amp.init_trainer(trainer), AssertionError, "amp.init()")  # MXNet's own words
amp.init()
refused(lambda: amp.init_trainer(trainer), TypeError, "Leave out amp.init()")
refused(lambda: before(mx.nd.ones((4, 6))), RuntimeError, "amp.init() of mxnet.contrib.amp was called")
refused(lambda: mxmp.convert(dense()), RuntimeError, "amp.init() of mxnet.contrib.amp was called")
refused(lambda: mxmp.tune(dense(), (4, 6), measure=False), RuntimeError, "amp.init() of mxnet.contrib.amp was called")
"""


@pytest.mark.slow
def test_amp_init_in_the_same_process_is_refused():
    run_program("-c", AMP_INIT)
