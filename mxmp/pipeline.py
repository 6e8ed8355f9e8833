"""From an FP32 graph to the graph that runs: remove earlier casts, decide, insert casts, fit to the device's kernels.

``low_graph`` does this for one graph; a ``Conversion`` does it for all graphs of a network, which share parameters.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache, partial
from glob import escape
from typing import Any, Callable, Collection, Iterable, Mapping, Set, Union

import mxnet as mx

from .kernels.channels_last import WHY_SLOW, norms_over_rows
from .kernels.fit import UNKNOWN, fit_to_device
from .policy import Policy, as_policy
from .precision.casts import CastGraph, insert_casts, strip
from .precision.decide import NO_SHAPES, decide
from .precision.graph import Graph
from .precision.plan import Plan, PlannedGraph, check_fit, summed_in_fp32
from .precision.subgraphs import Body, set_bodies, wrongly_differentiated

logger = logging.getLogger("mxmp")
# Returns the plan of one graph under a policy or plan, given the names of the parameters that may be stored in float16
# or FP32, and those of the parameters that are stored in float16 already.
Decider = Callable[[Union[Policy, Plan], Set[str], Set[str]], Plan]


def low_graph(graph: Graph, how: Policy | Plan, device: str, *, keep_output_names: bool = False) -> tuple[Graph, Plan]:
    """Return a copy of an FP32 graph that computes in low precision, and the plan (every operator's dtype) it follows.

    The copy has the casts of the plan and the workarounds for the device's kernels. Those of an earlier conversion are
    removed first, so a converted graph gives the same result as its FP32 graph. ``graph`` is not changed.

    Parameters
    ----------
    graph : Graph
        The FP32 graph, or one that was converted before.
    how : Policy or Plan
        A policy, under which the rules decide each operator's dtype, or a plan, which is followed.
    device : {"cpu", "gpu"}
        Where the graph will run.
    keep_output_names : bool
        True: an operator with several outputs stays in FP32 if one of them is an output of the graph, because a cast
        would rename that output. Has no effect if ``how`` is a plan.

    Raises
    ------
    ValueError
        The policy cannot be followed on the device (bfloat16 on a GPU), the rule table lacks an operator of the graph,
        or the plan is of another graph or device.
    """
    original = strip(graph)
    if isinstance(how, Plan):
        plan = _planned_for(device, how)
    else:
        plan = decide(original, how, device, keep_output_names=keep_output_names)
    return emitted(original, plan).graph, plan


def emitted(
    graph: Graph,
    plan: Plan,
    grad_req: Mapping[str, str] = UNKNOWN,
    *,
    large_inputs: bool = False,
    avoid_slow_kernels: bool | None = None,
) -> CastGraph:
    """Return the graph to run for an FP32 graph and its plan: with casts, and with workarounds for the plan's device.

    Besides the graph, the CastGraph lists the casts, the workarounds, and the bodies of control flow, which are
    converted too. A body returns FP32, so that the states of a loop keep their dtype from one iteration to the next.
    What it reads is cast inside it. The exception are data and weights of a ``foreach`` that all operators of the body
    read in float16: these are cast once, in front of the loop (see ``Plan.within``). If nothing computes in low
    precision, there are no casts. ``graph`` is not changed.

    Parameters
    ----------
    graph : Graph
        The FP32 graph, without casts that mxmp inserted.
    plan : Plan
        A plan of this graph; otherwise ``ValueError`` is raised.
    grad_req : mapping of str to str
        From the name of a variable to its ``grad_req``, on which some workarounds depend: ``"write"``, ``"add"`` or
        ``"null"``. A variable that is missing gets every workaround that one of the values would need.
    large_inputs : bool
        True: the graph runs only with inputs that are large beside the padding, so leave out the workarounds for
        oneDNN's wrong weight gradients at small ones (see ``LargeInputs`` in ``kernels/padding.py``). Bodies keep them.
    avoid_slow_kernels : bool, optional
        False applies only the workarounds without which the graph fails or is wrong, and none of those that only make
        it faster. Default: ``plan.avoids_slow_kernels``, which is True if an operator computes in low precision, or if
        ``tune`` measured that the FP32 graph is faster with them.
    """
    if avoid_slow_kernels is None:
        avoid_slow_kernels = plan.avoids_slow_kernels
    planned = PlannedGraph(graph, plan)
    casted = insert_casts(planned)
    for copy, node in casted.source.items():
        if node.subgraphs:
            within = planned.within[node]
            read = {position: entry.node.name for position, entry in enumerate(node.inputs)}
            requested = {position: grad_req[name] for position, name in read.items() if name in grad_req}
            low = [(body, inner, _low_body(body, inner, requested, avoid_slow_kernels)) for body, inner in within]
            casted.bodies[node] = low
            set_bodies(copy, [each.graph for *_, each in low])
    casted.graph = fit_to_device(
        casted, plan.device, grad_req, large_inputs=large_inputs, avoid_slow_kernels=avoid_slow_kernels
    )
    return casted


def _low_body(body: Body, plan: Plan, requested: Mapping[int, str], avoid_slow_kernels: bool) -> CastGraph:
    """Return the graph to run for the FP32 ``body`` of a loop or branch, as ``emitted`` makes it.

    ``plan`` is the body's own plan. ``requested`` maps positions of the control-flow node's inputs to the ``grad_req``
    of the variables there; a position is missing if the ``grad_req`` is not known.
    """
    within = {variable.name: requested[i] for variable, i in body.positions.items() if i in requested}
    # In a body MXNet adds the gradients of the iterations.
    added = {name: "add" if request == "write" else request for name, request in within.items()}
    return emitted(body.graph, plan, added, avoid_slow_kernels=avoid_slow_kernels)


def emulated(how: Policy | Plan, device: str) -> Policy | Plan:
    """Return ``how``; of a GPU's float16 Plan a copy for ``device``, which may be a CPU that emulates float16."""
    if isinstance(how, Plan) and how.policy.compute == "float16" and how.device == "gpu":
        return replace(how, device=device)
    return how


class Conversion:
    """Converts all graphs of one network by one policy or plan, and records how the network's parameters are stored.

    ``convert`` and Module make one for each network, and it lives as long as the network is converted. A network has
    several graphs: for training and inference, for each bucket, for parts that are called alone. They share parameters,
    so the first graph that reads a parameter decides how it is stored, and later graphs use it as it is.

    Attributes
    ----------
    how : Policy or Plan
        A policy, under which the rules decide each operator's dtype, or a plan, which is followed.
    stored_low : dict of str to bool
        From the name of each parameter that a graph built so far reads to True if it is stored in float16, with FP32
        master weights, and False if it is stored in FP32.
    """

    def __init__(self, how: Policy | Plan) -> None:
        self.how = how
        self.stored_low: dict[str, bool] = {}
        self._wrong: set[str] = set()

    @property
    def policy(self) -> Policy:
        """Return the policy of the conversion; if a plan decides, the plan's policy."""
        return self.how.policy if isinstance(self.how, Plan) else self.how

    @property
    def plan(self) -> Plan | None:
        """Return the plan that the network was converted by; None if it was converted by a policy."""
        return self.how if isinstance(self.how, Plan) else None

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep the operators with the names ``nodes`` (``"fc1_fwd"``) in FP32 in all graphs that ``build`` makes later.

        Adds the names, with wildcards escaped, to ``exclude`` of the policy, or of the plan's policy. As any pattern,
        ``"fc1_fwd"`` also excludes nodes whose names begin with ``"fc1_fwd_"``. Also clears ``stored_low``, so that the
        next graphs decide anew how the parameters are stored.
        """
        policy = as_policy(self.policy, [escape(name) for name in nodes])
        self.how = replace(self.how, policy=policy) if isinstance(self.how, Plan) else policy
        self.stored_low.clear()

    def build(
        self,
        symbol: mx.sym.Symbol,
        device: str,
        parameters: Iterable[str],
        *,
        stored: Mapping[str, bool],
        strict: bool,
        fixed: Collection[str] = (),
        constants: Collection[str] = (),
        reads_data: bool = True,
        keep_output_names: bool = False,
        grad_req: Mapping[str, str] = UNKNOWN,
        large_inputs: bool = False,
        training_shapes: Mapping[str, tuple] = NO_SHAPES,
        sparse: Mapping[str, str] = UNKNOWN,
    ) -> tuple[Graph, Plan]:
        """Return the graph in low precision for an FP32 Symbol of the network, and the plan that it follows.

        Records in ``stored_low`` how each parameter is to be stored; the caller stores it so. If an operator computes
        in float16 on a CPU, logs a warning, once in a process, that this is an emulation.

        Parameters
        ----------
        symbol : Symbol
            The FP32 graph. Casts of an earlier conversion are removed.
        device : {"cpu", "gpu"}
            Where the graph will run.
        parameters : iterable of str
            The names of all parameters that the Symbol reads.
        stored : mapping of str to bool
            From the name of each parameter whose storage is decided already, by this conversion or by that of another
            net that shares it, to True for float16 and False for FP32. The plan decides for all parameters without an
            entry, except those in ``fixed``.
        strict : bool
            Counts only if the network is converted by a plan. True: the plan must have exactly the operators of this
            graph. False: the graph may be that of another mode (training or inference), bucket or part of the network;
            operators with the same name and type follow the plan, and the rules decide for all others.
        fixed : collection of str
            Names of parameters that must stay in FP32, unless ``stored`` says otherwise.
        constants : collection of str
            Those of ``parameters`` that never train, such as Gluon Constants; they must stay in FP32 too.
        reads_data : bool
            Whether the inputs are data; False if they may be features, which another graph computed.
        keep_output_names : bool
            True: an operator with several outputs stays in FP32, even against a plan, if one of them is an output of
            the graph, because a cast would rename that output.
        grad_req : mapping of str to str
            From the name of a variable to its ``grad_req``, on which some workarounds depend; missing if not known.
        large_inputs : bool
            True: leave out the workarounds that only inputs which are small beside the padding need (``emitted``).
        training_shapes : mapping of str to tuple
            The shapes of the inputs by name, if the graph will train with about these; empty if not known or for
            inference. Some bfloat16 kernels train slower than FP32's for few rows.
        sparse : mapping of str to str
            From the name of each variable that holds a sparse array, or gets a row-sparse gradient, to the reason why
            it is not cast; only those of which the Symbol does not say so.

        Raises
        ------
        ValueError
            The plan is of another network or device; the policy cannot be followed on the device; the rule table lacks
            an operator; or a Gluon net would read a parameter in FP32 that a net with which it shares the parameter
            stores in float16.
        """
        original, names = strip(Graph.from_symbol(symbol)), list(parameters)
        if self.plan is not None and strict:
            check_fit(original.names(), _planned_for(device, self.plan))
        learned = {*names}.difference(constants)
        undecided = {each for each in learned if each not in stored and each not in fixed}
        low = {each for each, is_low in stored.items() if is_low}
        options: dict[str, Any] = {
            "keep_output_names": keep_output_names,
            "training_shapes": training_shapes,
            "learned": learned if reads_data else None,
            "non_fp32": sparse,
        }
        plan = self._decide(partial(_decided, original, device, options), device, undecided, low)
        graph = emitted(original, plan, grad_req, large_inputs=large_inputs).graph
        for each in names:
            self.stored_low.setdefault(each, stored.get(each, each in plan.low_variables))
        self._warn_of_control_flow(original, grad_req)
        if device == "cpu" and plan.policy.compute == "float16" and plan.num_low:
            _log_that_float16_is_emulated()
        if device == "gpu":
            self._warn_of_norms(original)
        return graph, plan

    def preview(
        self,
        symbol: mx.sym.Symbol,
        device: str,
        parameters: Iterable[str],
        *,
        reads_data: bool = True,
        keep_output_names: bool = False,
        training_shapes: Mapping[str, tuple] = NO_SHAPES,
    ) -> Plan:
        """Return the plan that ``build`` would follow for an FP32 Symbol, and record nothing.

        The arguments and errors are those of ``build``; ``parameters`` are without constants.
        """
        original, names = strip(Graph.from_symbol(symbol)), set(parameters)
        options: dict[str, Any] = {
            "keep_output_names": keep_output_names,
            "training_shapes": training_shapes,
            "learned": names if reads_data else None,
        }
        low = {each for each in names if self.stored_low.get(each)}
        undecided = {each for each in names if each not in self.stored_low}
        return self._decide(partial(_decided, original, device, options), device, undecided, low)

    def _warn_of_control_flow(self, graph: Graph, grad_req: Mapping[str, str]) -> None:
        """Log a warning, once for each operator, if MXNet gives wrong gradients through control flow in ``graph``."""
        found = [name for name in wrongly_differentiated(graph, grad_req) if name not in self._wrong]
        self._wrong.update(found)
        if found:
            logger.warning(
                "%s: in a graph MXNet gives wrong gradients through while_loop, and through a cond of whose branches "
                "only one reads a parameter, in FP32 too. Use foreach, or F.where on the results of both branches; or "
                "leave the block as Python: mxmp.convert(net, exclude=lambda name, block: ...)",
                ", ".join(found),
            )

    def _warn_of_norms(self, graph: Graph) -> None:
        """Log a warning, once for each BatchNorm, if it is slow on a GPU because its axis is not 1."""
        found = [name for name in norms_over_rows(graph) if name not in self._wrong]
        self._wrong.update(found)
        if found:
            logger.warning("%s: BatchNorm with another axis than 1. %s", ", ".join(found[:3]), WHY_SLOW)

    def _decide(self, decided: Decider, device: str, undecided: set[str], low: set[str]) -> Plan:
        """Return the plan of one FP32 graph, which is to run on ``device``. A subclass may decide otherwise.

        ``decided(how, undecided, low)`` returns the graph's plan under the Policy or Plan ``how``. ``undecided`` has
        the names of the parameters for which the plan may choose float16 or FP32; ``low`` has those of the parameters
        that are stored in float16 already.
        """
        return decided(self.how, undecided, low)


@lru_cache(maxsize=None)
def _log_that_float16_is_emulated() -> None:
    logger.warning(
        "float16 is emulated on a CPU, to show how it trains, and is slower than FP32. The fast dtype of a CPU with "
        "AVX512-BF16 or AMX is 'bfloat16'"
    )


def _decided(
    graph: Graph, device: str, options: Mapping[str, Any], how: Policy | Plan, undecided: set[str], low: set[str]
) -> Plan:
    """Return a plan for one FP32 graph under ``how``: the policy or plan by which the user converts the network.

    If ``how`` is a plan, it decides for operators that have the same name and type in it, and the rules for all others.
    ``options`` are further arguments of ``decide``. ``undecided`` has the names of the parameters for which the plan
    may choose float16 or FP32, ``low`` those of the parameters that are stored in float16 already. Raises
    ``ValueError`` if ``decide`` does, or if ``how`` is a plan for another device or without any operator of the graph.
    """
    given = _planned_for(device, how).decisions if isinstance(how, Plan) else {}
    policy = how.policy if isinstance(how, Plan) else how
    plan = decide(graph, policy, device, parameters=undecided, stored_low=low, decided=given, **options)
    if not isinstance(how, Plan):
        return plan
    if not plan.decisions.keys() & given.keys():
        check_fit(graph.names(), how)
    return replace(plan, tuned=how.tuned)


def _planned_for(device: str, plan: Plan) -> Plan:
    """Return ``plan``, with softmax and LayerNorm in FP32 if they would sum in float16 here (see ``summed_in_fp32``).

    Raises ``ValueError`` if ``plan`` was made for another device than ``device``.
    """
    if plan.device != device:
        raise ValueError(f"the plan was made for a {plan.device}, and the graph is to run on a {device}: plan it there")
    return summed_in_fp32(plan)
