"""The minimum cut against brute force, and its model against the graph that is emitted."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from kit.examples import examples
from kit.graphs import graphs
from kit.oracle import S
from mxnet.contrib import amp
from mxnet.gluon.model_zoo import vision

from mxmp import Policy
from mxmp.precision.casts import insert_casts, strip
from mxmp.precision.graph import Entry, Graph, Node
from mxmp.precision.plan import Decision, Plan, PlannedGraph
from mxmp.tuning.choices import Task, cast_bytes, shapes_of
from mxmp.tuning.cut import Choice, Costs, cheapest

OPS = ["Convolution", "FullyConnected", "relu", "elemwise_add", "BatchNorm", "SliceChannel", "exp", "Embedding"]


def random_graph(rng: np.random.RandomState) -> Graph:
    """Any operators on any tensors: nothing of it has to compute."""
    tensors = [Entry(Node("null", f"v{i}")) for i in range(rng.randint(1, 4))]
    for number in range(rng.randint(1, 9)):
        op = OPS[rng.randint(len(OPS))]
        inputs = [tensors[rng.randint(len(tensors))] for _ in range(rng.randint(1, 4))]
        node = Node(op, f"n{number}", {}, inputs)
        tensors += [Entry(node, index) for index in range(rng.randint(1, 3))]
    heads = [tensors[rng.randint(len(tensors))] for _ in range(rng.randint(1, 3))]
    return Graph([*heads, tensors[-1]])


def random_choice(seed: int) -> tuple[Choice, Costs]:
    rng = np.random.RandomState(seed)
    graph = random_graph(rng)
    policy = Policy("bfloat16", output=["float32", "compute"][rng.randint(2)])
    nodes = [node for node in graph.nodes() if not node.is_variable]
    plan = Plan(policy, "cpu", {node.name: Decision(node.op, False, "") for node in nodes})
    sides = {node: rng.randint(4) for node in nodes}
    variables = [node for node in graph.nodes() if node.is_variable]
    choice = Choice(
        PlannedGraph(graph, plan),
        [node for node in nodes if sides[node] > 1],
        [node for node in nodes if sides[node] == 1],
        [node for node in variables if rng.randint(2)],
    )

    def draw(keys) -> dict:
        return {key: float(rng.randint(0, 12)) for key in keys if rng.randint(5)}

    def draw_casts(to_fp32: bool) -> dict:
        alone = {entry: choice.sole_decider(entry, to_fp32) is not None for entry in choice.tensors}
        return {entry: cost - 6 * alone[entry] for entry, cost in draw(choice.tensors).items()}

    return choice, Costs(draw(nodes), draw(nodes), draw_casts(False), draw_casts(True))


def brute(choice: Choice, costs: Costs) -> float:
    free = list(choice.free)
    return min(
        choice.cost(choice.always_low | {node for node, low in zip(free, picked) if low}, costs)
        for picked in itertools.product((False, True), repeat=len(free))
    )


@pytest.mark.parametrize("block", range(4))
def test_the_cut_is_as_good_as_the_best_of_all_on_1000_random_graphs(block):
    for seed in range(250 * block, 250 * (block + 1)):
        choice, costs = random_choice(seed)
        found = cheapest(choice, costs)
        assert choice.always_low <= found <= choice.always_low | choice.free
        assert choice.cost(found, costs) == brute(choice, costs), seed


def test_a_cast_that_pays_for_itself_is_refused_where_several_decide_on_it():
    x, weight = S.FullyConnected(S.var("data"), num_hidden=4, name="a"), S.var("weight")
    both = S.elemwise_add(*(S.FullyConnected(x, weight, no_bias=True, num_hidden=4, name=n) for n in "bc"))
    choice = Task(Graph.from_symbol(both), Policy("bfloat16"), "cpu").choice
    (entry,) = (entry for entry in choice.tensors if entry.node.name == "weight")
    with pytest.raises(ValueError, match="several operators decide"):
        cheapest(choice, Costs({}, {}, {entry: -1.0}, {}))


def bytes_emitted(graph: Graph, plan: Plan, shapes: dict) -> int:
    """Of the casts in the graph that runs."""
    casted = insert_casts(PlannedGraph(graph, plan))
    return sum(6 * prod(shapes[cast.tensor]) for cast in casted.casts.values())


POLICIES = [
    Policy("bfloat16"),
    Policy("float16", params="float16"),
    Policy("float16", output="compute", norm="compute"),
]


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(graphs())
def test_the_bytes_of_the_model_are_those_of_the_emitted_graph_and_no_plan_has_fewer(drawn):
    symbol, given_shapes = drawn
    graph = strip(Graph.from_symbol(symbol))
    shapes = shapes_of(graph, given_shapes)
    moved = cast_bytes(shapes)
    for policy in POLICIES:
        task = Task(graph, policy, "cpu")
        costs = Costs({}, {}, moved, moved)
        of_rules = bytes_emitted(graph, task.rules_plan, shapes)
        best = task.least_bytes(shapes)
        for low in (best, task.may_be_low, task.matrix_operators, task.low_nodes(task.rules_plan), frozenset()):
            assert task.choice.cost(low, costs) == bytes_emitted(graph, task.plan(low, {}), shapes)
        assert task.choice.cost(best, costs) <= of_rules
        assert task.low_nodes(task.rules_plan) <= task.may_be_low
        assert task.matrix_operators <= best


def test_what_is_not_to_choose_stays_as_the_rules_have_it():
    """The slice, an output behind an FP32 norm, followed its input into float16, and the model did not know it."""
    x = S.Convolution(S.var("data"), num_filter=4, kernel=(3, 3), pad=(1, 1), name="conv")
    x = S.relu(S.BatchNorm(x, name="norm"), name="relu")
    symbol = S.slice_axis(S.Concat(x, x, dim=0, name="twice"), axis=0, begin=1, end=3, name="part")
    graph = Graph.from_symbol(symbol)
    shapes = shapes_of(graph, {"data": (2, 4, 6, 6)})
    task, moved = Task(graph, Policy("float16"), "cpu"), cast_bytes(shapes)
    plan = task.plan(task.may_be_low, {})
    assert not plan.decisions["part"].low
    assert task.choice.cost(task.may_be_low, Costs({}, {}, moved, moved)) == bytes_emitted(graph, plan, shapes)


def bytes_of_amp(symbol, shapes: dict) -> int:
    """Of the casts that ``mxnet.contrib.amp`` makes, but for those that change nothing."""
    graph = Graph.from_symbol(amp.convert_symbol(symbol, target_dtype="bfloat16"))
    casts = [node for node in graph.nodes() if node.op in ("amp_cast", "amp_multicast")]
    made = [Entry(node, i) for node in casts for i in range(len(node.inputs))]
    read = [entry for node in casts for entry in node.inputs]
    both = Graph([*made, *read]).to_symbol()
    sizes, types = both.infer_shape(**shapes)[1], both.infer_type(data=np.float32)[1]
    width = [np.dtype(dtype).itemsize for dtype in types]
    return sum(6 * prod(sizes[i]) for i in range(len(made)) if width[i] != width[i + len(made)])


@pytest.mark.parametrize("name", ["mobilenetv2_0.25", "squeezenet1.0", "resnet18_v2", "alexnet"])
def test_no_zoo_network_moves_more_bytes_than_by_contrib_amp(name):
    net = vision.get_model(name)
    symbol = net(S.var("data"))
    graph, given_shapes = Graph.from_symbol(symbol), {"data": (2, 3, 224, 224)}
    shapes = shapes_of(graph, given_shapes)
    task = Task(graph, Policy("bfloat16"), "cpu", parameters=list(net.collect_params()), slow_too=True)
    best = task.plan(task.least_bytes(shapes), {})
    assert bytes_emitted(graph, best, shapes) <= bytes_of_amp(symbol, given_shapes)


@pytest.mark.parametrize("name", ["mobilenetv2_0.25", "squeezenet1.0", "densenet121", "resnet18_v2", "alexnet"])
def test_no_zoo_network_moves_more_bytes_than_by_the_rules(name):
    net = vision.get_model(name)
    graph = Graph.from_symbol(net(S.var("data")))
    shapes = shapes_of(graph, {"data": (2, 3, 224, 224)})
    for policy in (Policy("bfloat16"), Policy("float16")):
        for device in ("cpu", "gpu")[: 1 + (policy.compute == "float16")]:
            task = Task(graph, policy, device, parameters=list(net.collect_params()))
            best = task.plan(task.least_bytes(shapes), {})
            assert bytes_emitted(graph, best, shapes) <= bytes_emitted(graph, task.rules_plan, shapes)


def test_labels_and_positions_stay_as_they_are():
    data = S.FullyConnected(S.var("data"), num_hidden=4, name="fc")
    label = S.reshape(S.var("label"), shape=(-1,), name="label_flat")
    position = S.reshape(S.var("position"), shape=(-1,), name="position_flat")
    loss = S.SoftmaxOutput(S.relu(data, name="relu"), label)
    other = S.Embedding(position, input_dim=9, output_dim=4, name="embedding")
    handed_out = S.reshape(S.var("mask"), shape=(-1,), name="mask_flat")
    task = Task(Graph.from_symbol(S.Group([loss, other, handed_out])), Policy("bfloat16"), "cpu")
    assert {node.name for node in task.may_be_low} == {"fc", "relu"}


def test_what_matrix_operators_are_about_to_read_may_be_low():
    norm = S.relu(S.LayerNorm(S.var("data"), name="norm"), name="relu")
    graph = Graph.from_symbol(S.FullyConnected(norm, num_hidden=4, name="fc"))
    task = Task(graph, Policy("bfloat16"), "cpu")
    assert {node.name for node in task.may_be_low} == {"fc", "relu"}
    assert not task.rules_plan.decisions["relu"].low


def test_shapes_that_do_not_fit_or_are_too_few_are_named():
    graph = Graph.from_symbol(S.elemwise_add(S.var("a"), S.var("b")))
    with pytest.raises(ValueError, match="do not fit"):
        shapes_of(graph, {"a": (2,), "b": (3,)})
    with pytest.raises(ValueError, match="do not say the shape of a"):
        shapes_of(graph, {})


def test_a_shape_that_mxnet_knows_after_a_run_alone_is_no_missing_input():
    x = S.var("a")
    masked = S.contrib.boolean_mask(x, S.var("rows"), name="few")
    with pytest.raises(ValueError, match="'few' is a _contrib_boolean_mask, of which MXNet knows no shape"):
        shapes_of(Graph.from_symbol(S.relu(masked)), {"a": (2, 3), "rows": (2,)})
    either = S.contrib.cond(S.sum(x) > 0, lambda: x + 1, lambda: x - 1)
    with pytest.raises(ValueError, match="is a _cond, of which MXNet knows no shape"):
        shapes_of(Graph.from_symbol(either), {"a": (2, 3)})
