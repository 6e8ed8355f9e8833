"""The slips of a user's first hour: each says what was expected, what was received, and the likely fix."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from twins import array, seeded

import mxmp
from mxmp.gluon.parameter import BFLOAT16


def symbol():
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, name="fc1")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=3, name="fc2"), name="softmax")


def dense():
    return seeded(nn.Dense(3, in_units=6, prefix="d_"))


def bucketing(**more):
    return mxmp.BucketingModule(lambda key: (symbol(), ["data"], ["softmax_label"]), 1, **more)


# -- names of a precision ---------------------------------------------------------------------------

TAKE_A_POLICY = {
    "convert": lambda policy: mxmp.convert(dense(), policy),
    "cast_symbol": lambda policy: mxmp.cast_symbol(symbol(), policy),
    "Module": lambda policy: mxmp.Module(symbol(), policy=policy),
    "BucketingModule": lambda policy: bucketing(policy=policy),
    "explain": lambda policy: mxmp.explain(symbol(), policy=policy),
    "tune": lambda policy: mxmp.tune(dense(), (4, 6), policy=policy, measure=False),
    "Policy": lambda policy: mxmp.Policy(policy),
}
OTHER_NAMES = {
    "float16": ["fp16", "half", "FP16", "mixed_float16", "torch.float16", "float_16", np.float16, np.dtype("float16")],
    "bfloat16": ["bf16", "mixed_bfloat16", "torch.bfloat16", BFLOAT16],
}


@pytest.mark.parametrize("where", TAKE_A_POLICY)
@pytest.mark.parametrize(
    ("name", "meant"), [(name, meant) for meant, names in OTHER_NAMES.items() for name in names], ids=str
)
def test_another_library_s_name_of_a_precision_is_answered_with_ours(where, name, meant):
    with pytest.raises(ValueError, match=rf"did you mean '{meant}'\?$"):
        TAKE_A_POLICY[where](name)


@pytest.mark.parametrize("where", TAKE_A_POLICY)
@pytest.mark.parametrize("name", ["float32", "fp32", np.float32], ids=str)
def test_fp32_as_a_policy_is_answered_with_restore(where, name):
    with pytest.raises(ValueError, match=r"FP32 needs no policy.*mxmp\.restore"):
        TAKE_A_POLICY[where](name)


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


def test_a_block_in_exclude_is_answered_with_its_name():
    net = nn.HybridSequential()
    net.add(nn.Dense(3, prefix="head_"))
    with pytest.raises(ValueError, match=r"block\.name, 'head'"):
        mxmp.convert(net, exclude=[net[0]])


def test_arguments_in_the_wrong_order_are_no_question_of_the_policy():
    with pytest.raises(TypeError, match="takes a gluon Block, got str"):
        mxmp.convert("float16", dense())
    with pytest.raises(TypeError, match=r"Module takes an mxnet Symbol, got Dense: for a Block use mxmp\.convert"):
        mxmp.Module(dense())


# -- the path of a plan -----------------------------------------------------------------------------


def dtypes(explanation):
    return [(node.name, node.dtype) for node in explanation.nodes]


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_the_path_of_a_saved_plan_is_taken_wherever_a_plan_is(kind, tmp_path):
    plan = mxmp.tune(symbol(), data=(4, 6), policy=mxmp.Policy(exclude=["fc1"]), measure=False)
    plan.save(tmp_path / "a=b,c.json")
    path = kind(tmp_path / "a=b,c.json")
    want = mxmp.cast_symbol(symbol(), plan).tojson(remove_amp_cast=False)
    assert mxmp.cast_symbol(symbol(), path).tojson(remove_amp_cast=False) == want
    assert dtypes(mxmp.explain(symbol(), policy=path)) == dtypes(mxmp.explain(symbol(), policy=plan))
    for module in (mxmp.Module(symbol(), policy=path), bucketing(policy=path)):
        module.bind([("data", (4, 6))], [("softmax_label", (4,))])
        assert dict(dtypes(mxmp.explain(module)))["fc1"] == "float32"
        assert dict(dtypes(mxmp.explain(module)))["fc2"] == "float16"
    assert mxmp.diagnose.advise(symbol(), policy=path, data=(4, 6))


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
            mxmp.cast_symbol(symbol(), text)


def test_a_plan_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        mxmp.convert(dense(), "missing.json")


def test_tune_says_that_it_makes_plans(tmp_path):
    plan = mxmp.tune(dense(), (4, 6), policy="float16", measure=False)
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json"):
        with pytest.raises(ValueError, match=r"tune makes a Plan.*policy='compute=float16'"):
            mxmp.tune(dense(), (4, 6), policy=given, measure=False)
