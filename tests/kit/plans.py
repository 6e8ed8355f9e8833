"""Plans and exclusions that are drawn at random: whatever tuning or a user may choose must train like FP32."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Sequence

import mxnet as mx
from mxnet.gluon import HybridBlock

import mxmp
from mxmp.gluon.symbols import traced_call
from mxmp.precision.casts import strip
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.tuned import Tuned
from mxmp.tuning.choices import Task


def random_plan(net: HybridBlock, args: tuple, policy: mxmp.Policy, seed: int) -> mxmp.Plan:
    """Return a plan of ``net`` in which each operator that may compute low does so with a chance of one half.

    ``args`` are the arrays of a call in training mode.
    """
    symbol, _, params, _ = traced_call(net, args, training=True)
    return _drawn(Graph.from_symbol(symbol), policy, seed, parameters=list(params))


def random_plan_of_symbol(symbol: mx.sym.Symbol, policy: mxmp.Policy, seed: int) -> mxmp.Plan:
    """Return such a plan for a Symbol, as ``mxmp.Module`` takes it."""
    return _drawn(Graph.from_symbol(symbol), policy, seed, keep_output_names=True)


def _drawn(graph: Graph, policy: mxmp.Policy, seed: int, **storage: Any) -> mxmp.Plan:
    task = Task(strip(graph), policy, "cpu", slow_too=True, **storage)
    draw = random.Random(seed)
    low = frozenset(node for node in task.graph.nodes() if node in task.may_be_low and draw.random() < 0.5)
    plan = task.plan(low, {})
    return mxmp.Plan(plan.policy, plan.device, plan.decisions, plan.low_variables, (), Tuned("random", True))


def random_exclusions(symbols: Sequence[mx.sym.Symbol], seed: int) -> list[str]:
    """Return the names of some operators of these graphs: each with a chance of three in ten."""
    nodes = [node for symbol in symbols for node in Graph.from_symbol(symbol).nodes() if not node.is_variable]
    draw = random.Random(seed)
    return sorted({node.name for node in nodes if draw.random() < 0.3})


def two_layers() -> mx.sym.Symbol:
    x = mx.sym.relu(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="a"), name="r")
    return mx.sym.FullyConnected(x, num_hidden=3, name="b")


def tuned_plan() -> mxmp.Plan:
    """Return a plan of ``two_layers`` with what tuning would have measured."""
    found = decide(Graph.from_symbol(two_layers()), mxmp.Policy(exclude=["b"]), "cpu")
    one = {"float32": 1.0, "rules": 2.5}
    gains = {"float32": (1.0, 1.0, 1.0), "rules": (1.5, 2.0, 2.5)}
    return replace(found, tuned=Tuned("rules", True, one, gains, one, {"float32": 0, "rules": 1024}, ("a note",)))


Z = mx.sym.FullyConnected(mx.sym.var("data"), mx.sym.var("weight"), no_bias=True, num_hidden=4, name="z")


def fc(x: mx.sym.Symbol, name: str, width: int = 4) -> mx.sym.Symbol:
    return mx.sym.FullyConnected(x, num_hidden=width, name=name)


def low_of(symbol: mx.sym.Symbol, policy: str = "float16", device: str = "gpu") -> set[str]:
    """Return the names of the operators that a policy lets compute low."""
    plan = decide(Graph.from_symbol(symbol), mxmp.Policy.parse(policy), device)
    return {name for name, decision in plan.decisions.items() if decision.low}
