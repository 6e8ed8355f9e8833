"""A plan that somebody has edited: what cannot be low is refused, what the rules would not have low is said."""

import json

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

import mxmp
from mxmp.precision import safe_sums
from mxmp.precision.casts import strip
from mxmp.precision.decide import decide
from mxmp.precision.edited import doubtful
from mxmp.precision.graph import Graph

pytestmark = pytest.mark.filterwarnings("ignore:this CPU has neither")
DTYPES = ["float16", "bfloat16"]


def symbol():
    scores = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=6, name="fc")
    return mx.sym.Group([mx.sym.softmax(scores, name="sm"), mx.sym.argmax(scores, axis=1, name="am")])


def looped():
    def body(x, states):
        return mx.sym.softmax(mx.sym.FullyConnected(x, num_hidden=6, name="fc"), name="sm"), states

    with mx.name.NameManager():
        return mx.sym.contrib.foreach(body, mx.sym.var("data"), [])[0]


class Net(gluon.HybridBlock):
    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.dense = nn.Dense(6, in_units=5)

    def hybrid_forward(self, F, x):  # noqa: N803
        scores = self.dense(x)
        return F.softmax(scores, name="sm"), F.argmax(scores, axis=1, name="am")


def edited(plan, low="", without="", retyped=""):
    raw = json.loads(plan.to_json())
    compute = plan.policy.compute
    raw["operators"] = [
        [name, "exp" if name.endswith(retyped or "?") else op, compute if name.endswith(low or "?") else dtype, why]
        for name, op, dtype, why in raw["operators"]
        if not name.endswith(without or "?")
    ]
    return mxmp.Plan.from_json(json.dumps(raw))


def used(frontend, dtype, training=True, **edits):
    """Use an edited plan in one of the frontends."""
    if frontend == "gluon":
        net = Net()
        net.initialize()
        mxmp.convert(net, edited(mxmp.tune(net, (4, 5), policy=dtype, measure=False), **edits))
        with autograd.record(train_mode=training):
            net(mx.nd.ones((4, 5)))[0].wait_to_read()
        return
    plan = edited(mxmp.tune(symbol(), data=(4, 5), policy=dtype, measure=False), **edits)
    if frontend == "cast_symbol":
        mxmp.cast_symbol(symbol(), plan)
    elif frontend == "explain":
        mxmp.explain(symbol(), policy=plan)
    else:
        mxmp.Module(symbol(), label_names=None, policy=plan).bind([("data", (4, 5))])


FRONTENDS = pytest.mark.parametrize("frontend", ["gluon", "module", "cast_symbol", "explain"])


@FRONTENDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operator_that_cannot_be_low_is_refused(frontend, dtype):
    with pytest.raises(ValueError, match=rf"the plan has '(net_)?am' in {dtype}, and argmax cannot compute in it: "):
        used(frontend, dtype, low="am")


@FRONTENDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operator_that_the_rules_keep_in_fp32_is_named_with_the_reason(frontend, dtype, caplog):
    used(frontend, dtype, low="sm")
    said = [record.getMessage() for record in caplog.records if "the plan has" in record.getMessage()]
    assert len(said) == 1
    assert f"sm in {dtype}, which the rules keep in FP32: its exponentials and their sum need FP32" in said[0]
    assert "low_ops" in said[0]


def test_an_operator_in_a_loop_is_named_too(caplog):
    plan = edited(mxmp.tune(looped(), data=(3, 4, 5), policy="bfloat16", measure=False), low="_foreach0/sm")
    mxmp.cast_symbol(looped(), plan)
    assert "the plan has _foreach0/sm in bfloat16" in caplog.text


def test_a_kernel_that_the_device_lacks_is_named(caplog):
    product = mx.sym.Deconvolution(mx.sym.var("data"), kernel=(3, 3), num_filter=4, num_group=2, name="de")
    both = mx.sym.FullyConnected(product, num_hidden=2, name="fc")
    plan = mxmp.tune(both, data=(1, 4, 8, 8), policy="bfloat16", measure=False)
    assert not plan.decisions["de"].low
    mxmp.cast_symbol(both, edited(plan, low="de"))
    assert "the plan has de in bfloat16" in caplog.text


@FRONTENDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_that_lacks_an_operator_is_refused(frontend, dtype):
    with pytest.raises(ValueError, match=r"only in the graph: \[\('(net_)?sm', 'softmax'\)\]"):
        used(frontend, dtype, without="sm")


def test_what_a_plan_of_training_lacks_in_inference_is_said_once(caplog):
    used("gluon", "bfloat16", training=False, without="sm")
    assert caplog.text.count("the plan has no decision for net_sm, in a graph that runs in inference") == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decision_about_an_operator_of_another_type_is_none(dtype, caplog):
    used("gluon", dtype, training=False, retyped="dense0_fwd")
    assert caplog.text.count("the plan has no decision for net_dense0_fwd, in a graph that runs in inference") == 1
    with pytest.raises(ValueError, match=r"only in the plan: \[\('net_dense0_fwd', 'exp'\)\]"):
        used("gluon", dtype, retyped="dense0_fwd")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_policy_may_ask_for_it(dtype, caplog):
    policy = mxmp.Policy(dtype, low_ops=["softmax"])
    mxmp.cast_symbol(symbol(), edited(mxmp.tune(symbol(), data=(4, 5), policy=policy, measure=False)))
    assert "the plan has" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("policy", ["float16", "float16-fast", "bfloat16", "bfloat16-safe"])
def test_nothing_is_said_of_a_plan_that_the_rules_or_tune_made(policy, safe, monkeypatch):
    monkeypatch.setenv(safe_sums.VARIABLE, str(int(safe)))
    for name in ("resnet18_v2", "mobilenetv2_0.25", "squeezenet1.0", "densenet121", "inceptionv3"):
        net = vision.get_model(name)
        graph = Graph.from_symbol(net(mx.sym.var("data")))
        for device in ("cpu",) if policy.startswith("b") else ("cpu", "gpu"):
            assert doubtful(strip(graph), decide(strip(graph), mxmp.Policy.parse(policy), device)) == {}
        shape = (1, 3, 299, 299) if name == "inceptionv3" else (1, 3, 224, 224)
        plan = mxmp.tune(graph.to_symbol(), data=shape, policy=policy, measure=False, ctx=mx.cpu())
        assert doubtful(strip(graph), plan) == {}
