"""Makes the plan of a graph by the rules: each operator computes in what is safe, if the device has a kernel for it.

A ``Draft`` decides, and ``readers.raised`` keeps in FP32 what an FP32 reader needs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Collection, Mapping

import mxnet as mx

from ..policy import Policy
from . import _mxnet
from .draft import DEFAULT, Draft, Options
from .graph import Graph, Node, output_shapes
from .plan import Decision, Plan, low_inputs
from .readers import raised
from .rules import RULES, Kind
from .subgraphs import Body, bodies

# Positions of the inputs that are taken for parameters where the caller does not say which variables are.
_WEIGHT_SLOTS = {
    "Convolution": (1, 2),
    "Deconvolution": (1, 2),
    "FullyConnected": (1, 2),
    "RNN": (1,),
}

_STEERS = "it computes the condition of a loop or branch, which rounding could change"


def check_policy(policy: Policy, device: str, operators: Collection[str] = ()) -> None:
    """Raise ``ValueError`` if MXNet cannot compute on ``device`` (``"cpu"`` or ``"gpu"``) what ``policy`` says."""
    if policy.compute == "bfloat16" and device == "gpu":
        raise ValueError(
            "MXNet 1.9.1 has no bfloat16 kernels for a GPU: use 'float16' there, or run bfloat16 on the CPU"
        )
    for name in ("low_ops", "full_ops"):
        for op in getattr(policy, name):
            own = _mxnet.name_in_graphs(op)
            # ``operators``, of a graph, may be of an mx.library, which a process that measures has not loaded.
            if not own and op not in RULES and op not in operators:
                raise ValueError(f"Policy({name}=[{op!r}]): MXNet has no operator {op!r}")
            if own not in ("", op):
                raise ValueError(f"Policy({name}=[{op!r}]): in graphs MXNet calls this operator {own!r}: use that name")
            rule = RULES.get(op)
            if rule and name == "low_ops" and rule.kind in (Kind.HEAD, Kind.ALONE):
                raise ValueError(f"Policy(low_ops=[{op!r}]): {op} cannot run in {policy.compute}: {rule.reason}")


def decide(graph: Graph, policy: Policy, device: str, options: Options = DEFAULT) -> Plan:
    """Return the plan of an FP32 graph by the rules: whether each operator computes in low precision, and why.
    Raises ``ValueError`` if ``check_policy`` refuses the policy, or ``rule_under`` an operator."""
    names = graph.names()
    check_policy(policy, device, {node.op for node in names})
    draft = Draft(policy, device, options)
    if policy.compute == "bfloat16" and options.training_shapes:
        draft.data_shapes = _shapes_of_products(graph, options.training_shapes)
    for node, rule, fixed in draft.operators(graph):
        given = options.decided.get(names[node])
        if fixed:
            decision = Decision(node.op, False, fixed)
        elif given is not None and given.op == node.op:
            decision = given
        else:
            decision = Decision(node.op, *draft.by_rule(node, rule))
        draft.rules[node], draft.decisions[node] = rule, decision
    inner: dict[Node, dict[str, Decision]] = {}
    unmatched = {p for p in policy.exclude if not any(draft.patterns[p].match(node.name) for node in names)}
    for node in filter(lambda node: node.subgraphs, draft.decisions):
        inner[node], within = {}, list(bodies(node))
        for body in within:
            prefix = body.prefix(names[node])
            found = _decide_body(node, body, prefix, draft, device)
            inner[node].update({prefix + name: decision for name, decision in found.decisions.items()})
            unmatched.intersection_update(found.unmatched)
        plan = Plan(policy, device, inner[node])
        draft.low_inputs[node] = low_inputs((body, plan.within(body, names[node])) for body in within)
    draft.settle(graph)
    for node, why in raised(graph, draft).items():
        draft.decisions[node] = Decision(node.op, False, why)
    decisions: dict[str, Decision] = {}
    for node, decision in draft.decisions.items():
        decisions.update({names[node]: decision, **inner.get(node, {})})
    low = _low_variables(graph, draft) if policy.stores_low(device) else set()
    return Plan(
        policy,
        device,
        decisions,
        frozenset(names[variable] for variable in low),
        tuple(p for p in policy.exclude if p in unmatched),
    )


def may_compute_low(graph: Graph, policy: Policy, device: str, options: Options = DEFAULT) -> dict[Node, Kind]:
    """Return the operators that a plan may have in low precision and round nothing that the rules would not round.
    Each has its kind, ``LOW`` or ``FOLLOW``."""
    decisions = decide(graph, policy, device, replace(options, any_kernel=True)).decisions
    names, heads = graph.names(), {entry.node for entry in graph.heads}
    low = {node for node, name in names.items() if not node.is_variable and decisions[name].low}
    draft = Draft(policy, device, options)
    found: dict[Node, Kind] = {}
    for node, rule, fixed in draft.operators(graph):
        draft.rules[node] = rule
        kind, _ = draft.kind(node, rule)
        if not fixed and kind in (Kind.LOW, Kind.FOLLOW):
            found[node] = kind
    low.intersection_update(found)
    readers = graph.readers()
    for node in reversed(list(found)):
        users = readers.get(node, [])
        # What only moves values, in front of these: rounding before it gives what rounding behind it gives.
        moves = draft.rules[node].exact and users and node not in heads
        if moves and all(user in low and position not in draft.rules[user].keep for user, position in users):
            low.add(node)
    return {node: kind for node, kind in found.items() if node in low}


def _decide_body(node: Node, body: Body, prefix: str, draft: Draft, device: str) -> Plan:
    """Return the plan of a body of ``node``, with names as in the body; ``draft`` is that of the graph around it."""
    outer = {variable.name: node.inputs[position].node for variable, position in body.positions.items()}
    decided = draft.options.decided
    options = Options(
        parameters=(),
        non_fp32={name: draft.non_fp32[source] for name, source in outer.items() if source in draft.non_fp32},
        decided={name[len(prefix) :]: decision for name, decision in decided.items() if name.startswith(prefix)},
        exported=draft.options.exported,
        is_body=True,
    )
    plan = decide(body.graph, draft.policy, device, options)
    fixed = draft.excluded(node.name) or (_STEERS if body.steers else "")
    if not fixed:
        return plan
    decisions = {name: Decision(d.op, False, fixed) for name, d in plan.decisions.items()}
    return Plan(draft.policy, device, decisions, unmatched=plan.unmatched)


def _shapes_of_products(graph: Graph, shapes: Mapping[str, tuple]) -> dict[Node, tuple]:
    """Return the shape of the data of each FullyConnected, as ``output_shapes`` does; empty if they do not fit."""
    products = [node for node in graph.nodes() if node.op == "FullyConnected"]
    if not products:
        return {}
    read = Graph([node.inputs[0] for node in products], graph.attrs, numpy=graph.numpy)
    try:
        return dict(zip(products, output_shapes(read.to_symbol(), shapes)))
    except mx.MXNetError:  # binding them will raise an error that says so
        return {}


def _low_variables(graph: Graph, draft: Draft) -> set[Node]:
    """Return the parameters that are stored in float16 already, or that all their readers read in float16."""
    options, heads = draft.options, {entry.node for entry in graph.heads}
    low = {node for node in graph.nodes() if node.is_variable and node.name in options.stored_low}
    for variable, users in graph.readers().items():
        if not variable.is_variable or variable in draft.non_fp32 or variable in heads:
            continue
        if all(draft.wants_low(node, position) for node, position in users) and (
            variable.name in options.parameters
            if options.parameters is not None
            else all(position in _WEIGHT_SLOTS.get(node.op, ()) for node, position in users)
        ):
            low.add(variable)
    return low
