"""One call of ``convert``: what it decided for all blocks of a net, and what the net's graphs have recorded since."""

from __future__ import annotations

import itertools
import logging
import weakref
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Collection, Iterable, Mapping

import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, Constant, HybridBlock, Parameter
from mxnet.ndarray import NDArray

from ..kernels.fit import device_of
from ..messages.callers import warn_user
from ..messages.text import class_of
from ..pipeline import Conversion, Decider, Use
from ..policy import Policy
from ..precision._mxnet import BFLOAT16
from ..precision.decide import check_policy
from ..precision.graph import Graph
from ..precision.operators import FLOAT64, SPARSE_GRADIENT, non_fp32
from ..precision.plan import Plan, message_of_idle, why_nothing_low, without_effect
from ..precision.subgraphs import refuse_fused
from . import _mxnet
from .blocks import Division, prefixes_of
from .parameter import LowParameter, conversions_of, is_scaling, overridden, store_low

logger = logging.getLogger("mxmp")
# Global: counts the training forwards of all converted nets, which puts them in an order.
_forwards = itertools.count(1)
# Global: the number of the last training forward of each converted net, 0 before the first. A backward writes running
# statistics of nets whose parameters another trainer updates, and nothing leads from the first trainer to them.
_last_forward: weakref.WeakKeyDictionary[NetConversion, int] = weakref.WeakKeyDictionary()


class NetConversion(Conversion):
    """One call of ``mxmp.convert``: what decides the dtypes of a net, and how its graphs have stored the parameters.
    Making it checks the net and changes nothing. A root is a block that runs as a graph and is called from Python code;
    once each has a graph, it warns if nothing is in low precision, or if what the policy names is in vain."""

    def __init__(self, how: Policy | Plan, division: Division) -> None:
        super().__init__(how)
        net = division.blocks[0]
        self._check_parameters(net)
        for block in division.graphs:
            if (symbol := _mxnet.own_symbol(block)) is not None:
                refuse_fused(symbol)
            if _mxnet.overrides_graph_calls(block):
                from ..messages.converted import no_own_graph_call  # what is said is loaded where it is needed

                raise no_own_graph_call(block.name, type(block).__name__)
        # The blocks with a hook of this conversion: none after ``restore``, another ``convert``, or the end of the net.
        self.blocks: weakref.WeakSet = weakref.WeakSet()
        # The running statistics (aux states) that any graph made so far reads, by name.
        self.statistics: dict[str, Parameter] = {}
        self._net = net.name
        # Code outside the graphs reads these parameters.
        unconverted = set(division.blocks) - set(division.graphs)
        self._fp32 = frozenset(param.name for block in unconverted for param in block.params.values())
        self._roots = frozenset(map(id, division.roots))
        self._whole = id(net) if id(net) in self._roots else 0
        names = [block.name for block in division.python]
        self._unmatched = [p for p in self.policy.exclude if not any(fnmatchcase(name, p) for name in names)]
        # Of ``low_ops`` and ``full_ops``: what no graph so far had a use for. A Plan may have reasons of its own.
        self._idle: dict[str, str] | None = None if self.plan is None else {}
        self._warned = False
        # Parameters without a Trainer, whose marks tell of a plain backward, by name.
        self.unowned: dict[str, Parameter] = {}
        self._await_first_graphs()
        _last_forward[self] = 0

    def _check_parameters(self, net: Block) -> None:
        params = list(net.collect_params().values())
        _check_dtypes(params)
        for param in params:
            for ctx in _mxnet.contexts(param):
                check_policy(self.policy, device_of(ctx))
                if self.plan is not None and self.plan.device != device_of(ctx):
                    from ..messages.converted import no_plan_of_another

                    raise no_plan_of_another(self.plan.device, param.name, ctx)
        check_policy(self.policy, "cpu")

    def _await_first_graphs(self) -> None:
        """Make ``build_graph`` check again whether the Plan fits the net, and whether anything is in low precision."""
        self._waiting = set(self._roots)
        # The plans of the roots' first graphs while nothing is in low precision; then None.
        self._without_low: list[Plan] | None = []
        # One graph must have exactly the Plan's operators: the first of any root, in the mode (training or inference)
        # that a tuned Plan was tuned for. Any other is refused only if it has no operator of the Plan; there the rules
        # decide for operators that the Plan lacks.
        self._fits = False

    def __getstate__(self) -> dict:
        """Return the attributes without ``blocks``, which the hooks of the copy fill."""
        return {name: value for name, value in vars(self).items() if name != "blocks"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, blocks=weakref.WeakSet())

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep ``nodes`` in FP32 in graphs that are built from now on; the caller deletes the existing ones."""
        super().exclude(nodes)
        self._unmatched, self._idle = [], {}
        self._await_first_graphs()

    def note_training_forward(self) -> None:
        _last_forward[self] = next(_forwards)

    def warn_of_unscaled_training(self, plan: Plan, requested: Iterable[tuple[Parameter, str]]) -> None:
        """Warn, once per conversion, if a graph in float16 trains without a loss scale: by MXNet's own Trainer, or by a
        plain backward, before this call of the net. ``requested``: the graph's parameters, each with ``grad_req``."""
        if self._warned or self.policy.compute != "float16" or plan.num_low == 0:
            return
        trained = [param for param, request in requested if request != "null"]
        trainer = next(filter(None, map(_mxnet.trainer_of, trained)), None)
        if autograd.is_recording() and trainer is not None and not is_scaling(trainer):
            from ..messages.converted import unscaled_by

            text = unscaled_by(class_of(trainer))
        # A backward reaches them all, or at least the first or the last.
        elif any(map(_has_plain_gradient, ends := trained[:1] + trained[-1:])):
            from ..messages.converted import unscaled_backward

            text = unscaled_backward(self._net)
        else:
            self.unowned.update((param.name, param) for param in ends if _mxnet.trainer_of(param) is None)
            return
        self._warned = True
        warn_user(text)

    def starts_at(self, block: Block) -> bool:
        """Return whether ``convert`` was called with this block, or found it outermost in Python code."""
        return id(block) in self._roots

    def build_graph(
        self,
        block: HybridBlock,
        graph: Graph,
        params: dict[str, Parameter],
        inputs: Mapping[str, NDArray],
        device: str,
        *,
        statistics: Iterable[str],
        large_inputs: bool,
        adds_to_inputs: bool,
    ) -> tuple[Graph, Plan]:
        """Return the low-precision graph for a block's FP32 graph, and its plan; store the parameters as the plan says.
        ``statistics`` names the aux states. ``large_inputs``: so large that some workarounds are left out
        (``pipeline.emitted``). ``adds_to_inputs``: MXNet may add an input's gradient to what the array holds."""
        self.statistics.update({name: params[name] for name in statistics if name in params})
        _check_dtypes(params.values(), allow_float64=False)
        tuned = None if self.plan is None else self.plan.tuned
        strict = self.starts_at(block) and not self._fits
        strict = strict and (tuned is None or tuned.training == autograd.is_training())
        # How the graphs of any of a parameter's nets have stored it. What this net's graphs decided overrules the rest.
        conversions = {name: [*reversed(conversions_of([param])), self] for name, param in params.items()}
        stored = {name: c.stored_low[name] for name in params for c in conversions[name] if name in c.stored_low}
        of_inputs = {} if adds_to_inputs else dict.fromkeys(inputs, "null")
        use = Use(
            device,
            params,
            stored=stored,
            fixed={name for name, p in params.items() if overridden(p)} | self._fp32,
            constants={name for name, p in params.items() if isinstance(p, Constant)},
            grad_req={**of_inputs, **{name: requested_gradient(param) for name, param in params.items()}},
            training_shapes={name: a.shape for name, a in inputs.items()} if autograd.is_training() else {},
            non_fp32={
                **non_fp32(inputs),
                **{name: SPARSE_GRADIENT for name, p in params.items() if _mxnet.gradient_storage(p) != "default"},
            },
            reads_data=self.reads_data(block),
            large_inputs=large_inputs,
            strict=strict,
            fits=self._fits,
        )
        low, planned = self.build(graph, use)
        self._fits = self._fits or strict
        if self.plan is not None and not self._fits and self.starts_at(block):
            self._log_undecided(planned)
        if use.reads_data:
            self.inputs.look_at(inputs, lambda: graph, planned)
        for name, param in params.items():
            if self.stored_low[name]:
                store_low(param, self.policy.compute)
        plan = replace(planned, blocks=prefixes_of(block))
        if id(block) in self._waiting:
            self._note_first_graph(block, plan, use)
        return low, plan

    def _log_undecided(self, planned: Plan) -> None:
        """Warn of operators that the plan given lacks, in a graph of the mode that it was not tuned for."""
        given = set() if self.plan is None else {(name, each.op) for name, each in self.plan.decisions.items()}
        mode = "training" if autograd.is_training() else "inference"
        self._warn_once(
            (name for name, each in planned.decisions.items() if (name, each.op) not in given),
            f"the plan has no decision for %s, in a graph that runs in {mode}: the rules decide",
        )

    def reads_data(self, block: HybridBlock) -> bool:
        """Return whether ``block`` is the whole net: its inputs are data, and no features of another block."""
        return id(block) == self._whole

    def _note_first_graph(self, block: HybridBlock, plan: Plan, use: Use) -> None:
        """Record that the root ``block`` has its first graph; if all roots have one, warn of faults."""
        self._waiting.discard(id(block))
        self._unmatched = [pattern for pattern in self._unmatched if pattern in plan.unmatched]
        idle = without_effect(plan)
        before = idle if self._idle is None else self._idle
        self._idle = {entry: why for entry, why in before.items() if entry in idle}
        # A tuned plan without operators in low precision says that FP32 is faster.
        # Of float64 beside FP32 parameters, MXNet's error says more.
        refused = bool(use.parameters) and FLOAT64 in use.non_fp32.values()
        if plan.num_low > 0 or plan.tuned is not None or refused:
            self._without_low = None
        elif self._without_low is not None:
            self._without_low.append(plan)
        if self._waiting:
            return
        if self._without_low is not None:
            warn_user(
                f"nothing in {self._net!r} computes in {plan.policy.compute}: {why_nothing_low(*self._without_low)}; "
                "print(mxmp.explain(net)) says why",
            )
        if self._unmatched:
            warn_user(f"exclude: no node or block of {self._net!r} matches {self._unmatched}")
        if self._idle:
            warn_user(f"{self._net!r} has {message_of_idle(self._idle)}")

    def _decide(self, decided: Decider, device: str, undecided: set[str], low: set[str]) -> Plan:
        """Return the plan of one graph, which may read parameters that another net has stored in float16.
        ``low`` names the parameters in float16, ``undecided`` those that may become so; both are for ``decided``."""
        stores = self.policy.stores_low(device)
        # What another net has stored in float16 stays so, even if this policy stores in FP32.
        shared = {name for name in low if not (stores and name in self.stored_low)}
        if not shared:
            return decided(self.how, undecided, low)
        if self.policy.compute == "float16":
            # As if this net stored it: every operator that reads it must read float16.
            policy = replace(self.policy, params="float16")
            storing = replace(self.how, policy=policy) if isinstance(self.how, Plan) else policy
            undecided = undecided if stores else set()
            shared -= decided(storing, undecided | shared, low - shared).low_variables
            if not shared:
                return replace(decided(storing, undecided, low), policy=self.policy)
        from ..messages.converted import no_two_dtypes

        raise no_two_dtypes(min(shared), self.policy)


def _has_plain_gradient(param: Parameter) -> bool:
    """Return whether a backward without a loss scale, where one is needed, has written a gradient of ``param``."""
    trainer = _mxnet.trainer_of(param)
    scales = trainer is None or (is_scaling(trainer) and trainer.may_scale and not trainer.ledger.pending)
    return scales and any(map(_mxnet.is_fresh, _mxnet.arrays(param)))


def requested_gradient(param: Parameter) -> str:
    """Return the ``grad_req`` of ``param``; ``"null"`` in inference that autograd does not record."""
    return param.grad_req if autograd.is_training() or autograd.is_recording() else "null"


def _check_dtypes(params: Iterable[Parameter], *, allow_float64: bool = True) -> None:
    """Raise ``ValueError`` for a parameter in float16 or bfloat16, or, unless allowed, a trained one in float64.
    A ``LowParameter``, whose ``dtype`` is float32, is accepted; another class with float16 arrays has no masters."""
    for param in params:
        dtype = np.dtype(_mxnet.dtype_of(param))
        is_trained_float64 = dtype == np.float64 and param.grad_req != "null"
        if dtype in (np.float16, BFLOAT16) or (is_trained_float64 and not allow_float64):
            from ..messages.converted import no_low_parameter

            raise no_low_parameter(param.name, param.dtype)
        if not isinstance(param, LowParameter) and any(array.dtype == np.float16 for array in _mxnet.arrays(param)):
            from ..messages.converted import no_arrays_of_another

            raise no_arrays_of_another(param.name, type(param).__name__)


def next_forward_number() -> int:
    """Return the next number of the count of training forwards, which all converted nets share."""
    return next(_forwards)


def any_conversion() -> bool:
    return bool(_last_forward)


def unowned_parameters() -> list[Parameter]:
    """Return parameters of converted nets that no Trainer updates, and whose marks tell of a plain backward."""
    noted = (param for conversion in list(_last_forward) for param in conversion.unowned.values())
    return [param for param in noted if _mxnet.trainer_of(param) is None]


def trained_since(number: int) -> list[NetConversion]:
    """Return the conversions of nets that began a training forward after ``number`` (``next_forward_number``)."""
    return sorted([conversion for conversion, last in list(_last_forward.items()) if last > number], key=id)
