"""A Plan is of a network's code: it fits the next network of that code, whatever MXNet numbers it, and no other."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.processes import run_program
from kit.twins import array, seeded, sequence
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp import Plan
from mxmp.gluon.blocks import blocks_of
from mxmp.precision.plan import Decision
from mxmp.precision.renaming import renamed

# MXNet says so of a network with another graph in evaluation.
pytestmark = pytest.mark.filterwarnings("ignore:Parameter .* is not used by any computation")


class Looped(gluon.HybridBlock):
    """A layer in the body of a loop, one in a branch, and operators that nobody names."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.cell = nn.Dense(4, in_units=4, flatten=False)
            self.out = nn.Dense(2, in_units=4, flatten=False)

    def hybrid_forward(self, F, x):  # noqa: N803
        def body(data, state):
            new = F.relu(self.cell(data) + state)
            return new, new

        out, _ = F.contrib.foreach(body, x, F.zeros_like(F.slice_axis(x, axis=0, begin=0, end=1)).reshape((-1, 4)))
        return self.out(F.tanh(out))


class Shared(gluon.HybridBlock):
    """Two layers with the parameters of the first, a block without operators, and one with a prefix of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.first = nn.Dense(4, in_units=4)
            self.second = nn.Dense(4, in_units=4, params=self.first.params)
            self.unused = nn.Dropout(0.5)
            self.head = nn.Dense(2, in_units=4, prefix="head_")

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.head(F.relu(self.second(self.first(x))))


class Modal(gluon.HybridBlock):
    """Another graph in evaluation, as a detector's."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.body = nn.Dense(4, in_units=4)
            self.train = nn.Dense(3, in_units=4)
            self.infer = nn.Dense(2, in_units=4)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.train(self.body(x)) if autograd.is_training() else F.softmax(self.infer(self.body(x)))


def flat():
    """Layers that are no children by name: each has a number of the process."""
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=4, activation="relu"), nn.Dense(4, in_units=4), nn.Dense(2, in_units=4))
    return net


def scoped():
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(nn.Dense(4, in_units=4), nn.HybridSequential())
        with net[1].name_scope():
            net[1].add(nn.Dense(4, in_units=4), nn.BatchNorm(in_channels=4), nn.Dense(2, in_units=4))
    return net


def unnamed():
    """No prefix of its own."""
    net = nn.HybridSequential(prefix="")
    net.add(nn.Dense(4, in_units=4), nn.Dense(2, in_units=4))
    return net


NETS = {"flat": flat, "scoped": scoped, "unnamed": unnamed, "shared": Shared, "modal": Modal, "looped": Looped}
SHAPES = {"looped": (3, 2, 4)}


def made(kind, **kwargs):
    net = NETS[kind](**kwargs)
    net.initialize(mx.init.Uniform(0.5))
    return net


def shape_of(kind):
    return SHAPES.get(kind, (2, 4))


def mixed_plan(kind, net, **more):
    """Every second operator that may compute low stays in FP32."""
    plan = mxmp.tune(net, shape_of(kind), policy="float16", measure=False, **more)
    low = [name for name, decision in plan.decisions.items() if decision.low]
    assert len(low) > 1
    keep = set(low[::2])
    decisions = {n: Decision(d.op, d.low and n not in keep, d.reason) for n, d in plan.decisions.items()}
    return Plan(plan.policy, plan.device, decisions, plan.low_variables, (), plan.tuned, plan.blocks)


def lows(decisions):
    """What computes low, by operator type and in graph order, without names."""
    return [(decision.op, decision.low) for decision in decisions.values()]


def train_graph(net, kind):
    with autograd.record():
        net(array(0, *shape_of(kind)))
    return next(graph.plan for graph in mxmp.explain(net).graphs if graph.training)


@pytest.mark.parametrize("again", [lambda plan: plan, lambda plan: Plan.from_json(plan.to_json())], ids=["", "read"])
@pytest.mark.parametrize("kind", NETS)
def test_the_plan_of_a_net_fits_the_next_one_of_the_same_code(kind, again):
    first = made(kind)
    plan = mixed_plan(kind, first)
    flat()  # numbers that are used up
    second = mxmp.convert(made(kind), again(plan))
    found = train_graph(second, kind)
    assert lows(found.decisions) == lows(plan.decisions)
    assert found.decisions.keys() != plan.decisions.keys()
    # The first net's own names still hold, and so do those that the second net's plan has.
    assert train_graph(mxmp.convert(first, again(plan)), kind).decisions == plan.decisions
    third = mxmp.convert(made(kind), again(found))
    assert lows(train_graph(third, kind).decisions) == lows(plan.decisions)


def test_names_that_overlap_are_not_taken_for_each_other():
    """The next net's first layer is called as the second of the one before: alone, it must follow the first's."""
    first = flat()
    numbers = [int(layer.name[5:]) for layer in first]
    plan = mxmp.tune(first, (2, 4), policy=mxmp.Policy(exclude=[first[1].name]), measure=False)
    second = flat()
    shifted = nn.HybridSequential()
    shifted.add(nn.Dense(4, in_units=4, activation="relu", prefix=f"dense{numbers[1]}_"))
    shifted.add(*(nn.Dense(4, in_units=4, prefix=f"dense{n + 1}_") for n in numbers[1:]))
    for net in (second, shifted):
        net.initialize()
        mxmp.convert(net, plan)
        net[0](array(0, 2, 4))  # a part, before the whole net was ever called
        net[1](array(0, 2, 4))
        net(array(0, 2, 4))
        low = {node.name: node.dtype for graph in mxmp.explain(net).graphs for node in graph.nodes}
        assert [low[f"{layer.name}_fwd"] for layer in net] == ["float16", "float32", "float16"]


def test_evaluation_first_follows_the_plan_of_training():
    first = made("modal")
    plan = mxmp.tune(first, (2, 4), policy=mxmp.Policy(exclude=[first.body.name]), measure=False)
    second = mxmp.convert(made("modal"), plan)
    second(array(0, 2, 4))
    nodes = {node.name: node.dtype for node in mxmp.explain(second).nodes}
    assert nodes[f"{second.body.name}_fwd"] == "float32"
    assert nodes[f"{second.infer.name}_fwd"] == "float16"


class Apart(gluon.HybridBlock):
    """No operator is in both graphs, that of training and that of evaluation."""

    def __init__(self):
        super().__init__(prefix="apart_")
        with self.name_scope():
            self.of_training, self.of_evaluation = nn.Dense(2, in_units=4), nn.Dense(2, in_units=4)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.of_training(x) if autograd.is_training() else self.of_evaluation(x)


def test_rules_decide_for_a_graph_of_the_other_mode_without_an_operator_of_the_plan():
    plans = []
    for how in ("float16", None):
        net = Apart()
        net.initialize()
        mxmp.convert(net, how or plans[0])
        with autograd.record():
            net(array(0, 2, 4))
        plans.append(mxmp.explain(net).graphs[0].plan)
        net(array(0, 2, 4))
        assert [node.dtype for graph in mxmp.explain(net).graphs for node in graph.nodes] == ["float16"] * 2
    assert plans[0].decisions == plans[1].decisions


PATTERNS = {
    "the block": lambda net: net[1].name,
    "the node": lambda net: f"{net[1].name}_fwd",
    "the block and a wildcard": lambda net: f"{net[1].name}*",
    "a wildcard and the number": lambda net: f"*{net[1].name[3:]}",
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_exclude_name_in_the_next_net_what_they_named_in_this_one(pattern):
    first = flat()
    plan = mxmp.tune(first, (2, 4), policy=mxmp.Policy(exclude=[PATTERNS[pattern](first)]), measure=False)
    for _ in range(2):
        second = flat()
        second.initialize()
        mxmp.convert(second, plan)
        second(array(0, 2, 4))
        nodes = {node.name: node.dtype for node in mxmp.explain(second).nodes}
        assert [nodes[f"{layer.name}_fwd"] for layer in second] == ["float16", "float32", "float16"]
        plan = mxmp.explain(second).graphs[0].plan
        assert not plan.unmatched


def test_a_pattern_that_would_match_another_layer_of_the_next_net_does_not():
    """``*a_`` named the first layer; in the next net another layer's name ends so."""

    def net(*prefixes):
        found = nn.HybridSequential(prefix="n_")
        found.add(*(nn.Dense(4, in_units=4, prefix=prefix) for prefix in prefixes))
        found.initialize()
        return found

    plan = mxmp.tune(net("xa_", "xb_"), (2, 4), policy=mxmp.Policy(exclude=["*a"]), measure=False)
    second = mxmp.convert(net("yb_", "ya_"), plan)
    second(array(0, 2, 4))
    assert {node.name: node.dtype for node in mxmp.explain(second).nodes} == {
        "yb_fwd": "float32",
        "ya_fwd": "float16",
    }


def test_parameters_stored_in_float16_are_those_of_the_next_net():
    policy = mxmp.Policy("float16", params="float16")
    plan = mxmp.tune(flat(), (2, 4), policy=policy, measure=False)
    second = flat()
    second.initialize()
    mxmp.convert(second, plan)
    second(array(0, 2, 4))
    stored = {p.name for p in second.collect_params().values() if hasattr(p, "masters")}
    assert stored == mxmp.explain(second).graphs[0].plan.low_variables
    assert stored == renamed(plan, [block.prefix for block in blocks_of(second)]).low_variables
    assert len(plan.low_variables - stored) == 6


def test_a_plain_block_around_one_net_takes_its_plan():
    plan = mixed_plan("scoped", made("scoped"))
    outer = nn.Sequential()
    outer.add(made("scoped"))
    assert lows(train_graph(mxmp.convert(outer, plan), "scoped").decisions) == lows(plan.decisions)


def test_advise_takes_the_plan_of_another_net_of_the_same_code():
    first, second = made("scoped"), made("scoped")
    plan = mxmp.tune(first, (2, 4), policy=mxmp.Policy(exclude=[first[0].name]), measure=False)
    plan = Plan(plan.policy, "gpu", plan.decisions, blocks=plan.blocks)
    low = {m.name: m.dtype for m in mxmp.diagnose.advise(first, (2, 4), policy=plan).matrices}
    other = {m.name: m.dtype for m in mxmp.diagnose.advise(second, (2, 4), policy=plan).matrices}
    assert list(low.values()) == list(other.values())
    assert set(low.values()) == {"float16", "float32"}
    assert low.keys() != other.keys()


# -- what it must not fit ---------------------------------------------------------------------------


def mlp(*widths, activation=None):
    return seeded(sequence(*(nn.Dense(width, in_units=4, activation=activation) for width in widths)))


OTHERS = {
    "a layer more": lambda: mlp(4, 4, 4),
    "a layer less": lambda: mlp(4),
    "an activation more": lambda: mlp(4, 4, activation="relu"),
    "another type": lambda: seeded(sequence(nn.Dense(4, in_units=4), nn.LayerNorm(in_channels=4))),
    "another order": lambda: seeded(sequence(nn.LayerNorm(in_channels=4), nn.Dense(4, in_units=4))),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_plan_of_other_code_is_refused(other):
    plan = mxmp.tune(mlp(4, 4), (2, 4), policy="float16", measure=False)
    net = mxmp.convert(OTHERS[other](), plan)
    with pytest.raises(ValueError, match="the plan is of another graph"), autograd.train_mode():
        net(array(0, 2, 4))
    mxmp.convert(net, "float16")(array(0, 2, 4))


def test_blocks_that_would_get_one_name_leave_the_plan_as_it_is():
    plan = mxmp.tune(mlp(4, 4), (2, 4), policy="float16", measure=False)
    assert renamed(plan, ["n_", "a_", "b_"]).blocks == ("n_", "a_", "b_")
    for blocks in (["n_", "a_", "a_"], ["n_", "a_"], ["n_", "a_", "b_", "c_"], [], ["", "", ""], plan.blocks):
        assert renamed(plan, blocks) is plan


def test_a_file_whose_blocks_are_none_is_refused():
    text = mxmp.tune(scoped(), (2, 4), policy="float16", measure=False).to_json()
    start = text.index(' "blocks"')
    end = text.index("],", start) + 1
    for wrong in ("[1]", "5", '{"a": 1}', '"dense0_"', "null", "[null]"):
        with pytest.raises(ValueError, match="not a precision plan"):
            Plan.from_json(f'{text[:start]} "blocks": {wrong}{text[end:]}')


# -- files ------------------------------------------------------------------------------------------


def test_a_file_of_before_fits_by_name_and_says_that_only_names_differ():
    net = scoped()
    plan = mxmp.tune(net, (2, 4), policy="float16", measure=False)
    text = plan.to_json()
    start = text.index(' "blocks"')
    old = Plan.from_json(text[:start] + text[text.index("],", start) + 2 :].lstrip())
    assert (old.blocks, old.decisions) == ((), plan.decisions)
    net.initialize()
    assert lows(train_graph(mxmp.convert(net, old), "scoped").decisions) == lows(plan.decisions)
    other = mxmp.convert(made("scoped"), old)
    with pytest.raises(ValueError, match=r"of another graph.*only names differ.*prefix="), autograd.train_mode():
        other(array(0, 2, 4))


PROGRAM = """
import os
import sys
import mxnet as mx
import mxmp
from mxnet.gluon import nn

def made(used):
    for _ in range(used):
        nn.HybridSequential(), nn.Dense(1)
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=4), nn.Dense(4, in_units=4), nn.Dense(2, in_units=4))
    net.initialize()
    return net

if sys.argv[1] == "save":
    net = made(0)
    plan = mxmp.tune(net, (2, 4), policy=mxmp.Policy(exclude=[net[1].name]), measure=False)
    plan.save(sys.argv[2])
else:
    for used in (0, 1, 9, 12):
        child = os.fork()  # MXNet is loaded once, and nobody has counted blocks yet
        if not child:
            net = mxmp.convert(made(used), sys.argv[2])
            net(mx.nd.ones((2, 4)))
            print(net[0].name, [node.dtype for node in mxmp.explain(net).nodes], flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_a_plan_of_another_process_fits_where_the_numbers_are_others(tmp_path):
    plan, dtypes = str(tmp_path / "plan.json"), "['float16', 'float32', 'float16']"
    run_program("-c", PROGRAM, "save", plan)
    found = run_program("-c", PROGRAM, "load", plan)
    assert found.splitlines() == [f"dense{used} {dtypes}" for used in (0, 1, 9, 12)]


def test_a_symbol_s_names_are_its_own():
    def symbol():
        return mx.sym.FullyConnected(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4), num_hidden=2)

    plan = mxmp.tune(symbol(), data=(2, 4), policy="float16", measure=False)
    assert plan.blocks == ()
    with pytest.raises(ValueError, match=r"only names differ.*NameManager"):
        mxmp.cast_symbol(symbol(), plan)
    with mx.name.NameManager():
        plan = mxmp.tune(symbol(), data=(2, 4), policy="float16", measure=False)
    with mx.name.NameManager():
        assert isinstance(mxmp.cast_symbol(symbol(), plan), mx.sym.Symbol)
