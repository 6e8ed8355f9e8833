"""One call of ``convert``: what it decided for all blocks of a net, and what the net's graphs have recorded since."""

from __future__ import annotations

import itertools
import warnings
import weakref
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Collection, Iterable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, Constant, HybridBlock, Parameter

from ..kernels.fit import device_of
from ..pipeline import Conversion, Decider
from ..policy import Policy
from ..precision.decide import SPARSE, SPARSE_GRADIENT, check_policy
from ..precision.graph import Graph
from ..precision.plan import NOTHING_LOW, Plan
from ..step.gradients import Gradient
from . import _mxnet
from .blocks import Division, prefixes_of
from .parameter import BFLOAT16, LowParameter, conversions_of, is_scaling, overridden, store_low

# Global: counts the training forwards of all converted nets, which puts them in an order.
_forwards = itertools.count(1)
# Global: the number of the last training forward of each converted net, 0 before the first. A backward writes running
# statistics of nets whose parameters another trainer updates, and nothing leads from the first trainer to them.
_last_forward: weakref.WeakKeyDictionary[NetConversion, int] = weakref.WeakKeyDictionary()


class NetConversion(Conversion):
    """One call of ``mxmp.convert``: what decides the dtypes of a net, and how its graphs have stored the parameters.

    Making the object checks the net and changes nothing of it; ``hook.install`` puts the hooks on its blocks. The net
    and the hooks refer to this object until the net is restored or converted again. A root is a block that runs as a
    graph and is called from Python code. When each root has its first graph, this object warns if no operator in these
    graphs computes in low precision, or if a pattern of ``exclude`` matches no operator and no block.

    Parameters
    ----------
    how : Policy or Plan
        What decides the dtype of each operator: the rules under a policy, or a plan.
    division : Division
        The blocks of the net to convert: which of them run as graphs and which as Python code.

    Raises
    ------
    ValueError
        A parameter is float16 or bfloat16, or is on another device than the plan is for; a block's class overrides
        MXNet's ``_call_cached_op``; or MXNet cannot compute as the policy says, anywhere (``low_ops`` has a name of no
        operator) or on a parameter's device (bfloat16 on a GPU).

    Attributes
    ----------
    blocks : WeakSet of HybridBlock
        The blocks that have a hook of this conversion; empty after ``restore`` or another ``convert`` has ended the
        conversion, or the net was deleted.
    statistics : dict of str to Parameter
        The running statistics (aux states) that any graph made so far reads, by name.
    """

    def __init__(self, how: Policy | Plan, division: Division) -> None:
        super().__init__(how)
        net = division.blocks[0]
        self._check_parameters(net)
        for block in division.graphs:
            if _mxnet.overrides_graph_calls(block):
                raise ValueError(
                    f"{block.name!r} ({type(block).__name__}) overrides _call_cached_op, by which MXNet calls the FP32 "
                    "graph, and a converted block calls another one. Override forward, or leave the block as Python: "
                    f"mxmp.convert(net, exclude=lambda name, block: name == {block.name!r})"
                )
        self.blocks: weakref.WeakSet = weakref.WeakSet()
        self.statistics: dict[str, Parameter] = {}
        self._net = net.name
        # Code outside the graphs reads these parameters.
        unconverted = set(division.blocks) - set(division.graphs)
        self._fp32 = frozenset(param.name for block in unconverted for param in block.params.values())
        self._roots = frozenset(map(id, division.roots))
        self._whole = id(net) if id(net) in self._roots else 0
        names = [block.name for block in division.python]
        self._unmatched = [p for p in self.policy.exclude if not any(fnmatchcase(name, p) for name in names)]
        self._warned = False
        self._await_first_graphs()
        _last_forward[self] = 0

    def _check_parameters(self, net: Block) -> None:
        """Raise ``ValueError`` if a parameter is float16 or bfloat16, or on a device without the policy's kernels.

        Also raises it if the plan is for another device than a parameter's, or if ``check_policy`` refuses the policy's
        ``low_ops`` or ``full_ops``.
        """
        params = list(net.collect_params().values())
        _check_dtypes(params)
        for param in params:
            for ctx in _mxnet.contexts(param):
                check_policy(self.policy, device_of(ctx))
                if self.plan is not None and self.plan.device != device_of(ctx):
                    raise ValueError(
                        f"the plan was made for a {self.plan.device}, and {param.name!r} is on {ctx}: tune there"
                    )
        check_policy(self.policy, "cpu")

    def _await_first_graphs(self) -> None:
        """Make ``build_graph`` check again whether the Plan fits the net, and whether anything is in low precision.

        A root is a block that runs as a graph and is called from Python code. One graph must have exactly the Plan's
        operators: the first of any root or, if the Plan was tuned, the first of any root in the mode (training or
        inference) that it was tuned for. Any other graph is refused only if it has no operator of the Plan. When each
        root has a graph, one warning follows if no operator of these graphs computes in low precision.

        Called when the net is converted, and by the method ``exclude``, after which all graphs are built anew.
        """
        self._waiting = set(self._roots)
        self._any_low = False
        self._fits = False

    def __getstate__(self) -> dict:
        """Return the attributes for ``copy`` and ``pickle``, but not ``blocks``, which the hooks of the copy fill."""
        return {name: value for name, value in vars(self).items() if name != "blocks"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, blocks=weakref.WeakSet())

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep the operators named ``nodes``, and those excluded before, in FP32 in graphs that are built from now on.

        Existing graphs stay as they are: the caller (``hook.exclude_more``, for ``mxmp.guard``) must delete them.
        """
        super().exclude(nodes)
        self._unmatched = []
        self._await_first_graphs()

    def note_training_forward(self) -> None:
        """Record that a block of this net begins a forward in training mode, for ``running_statistics_of``.

        The forward gets the next number of the count that all converted nets share.
        """
        _last_forward[self] = next(_forwards)

    def warn_of_unscaled_training(self, plan: Plan, requested: Iterable[tuple[Parameter, str]]) -> None:
        """Warn, once per conversion, if a graph computes in float16 and MXNet's own Trainer trains its parameters.

        MXNet's Trainer does not scale the loss, so small gradients become zero. To be called whenever autograd records
        a call of the graph. ``plan`` is the plan of the graph. ``requested`` has the parameters that the graph reads,
        each with its ``grad_req``. Of the parameters with a gradient and a Trainer, only the first one's Trainer is
        examined.
        """
        if self._warned or self.policy.compute != "float16":
            return
        trainers = (_mxnet.trainer_of(param) for param, request in requested if request != "null")
        trainer = next(filter(None, trainers), None)
        if trainer is None or plan.num_low == 0 or is_scaling(trainer):
            return
        self._warned = True
        warnings.warn(
            f"a net computes in float16 and is trained by a {type(trainer).__module__}.{type(trainer).__name__}, "
            "which does not scale the loss: gradients below 6e-8 become zero. Use mxmp.Trainer and "
            "trainer.backward(loss), or convert to bfloat16, which needs no scaling",
            stacklevel=4,
        )

    def build_graph(
        self,
        block: HybridBlock,
        symbol: mx.sym.Symbol,
        params: dict[str, Parameter],
        device: str,
        large_inputs: bool,
        shapes: Mapping[str, tuple],
        adds_to_inputs: bool,
        sparse: Collection[str] = (),
    ) -> tuple[Graph, Plan]:
        """Return a block's low-precision graph and the plan that it follows; store its parameters as the plan says.

        A parameter that an earlier graph reads, of this net or of another one, stays stored as it is. Where an operator
        here reads in FP32 what is stored in float16, the graph has a cast if this net has stored it so; if only another
        net has, ``ValueError`` is raised. Any other parameter becomes a ``LowParameter`` (float16 with FP32 master
        weights) if the policy stores parameters in float16 and all operators that read it compute in float16. But a
        Constant, a parameter of a HybridBlock that runs as Python code, and one of a user's own class that overrides a
        method of Parameter, stays in FP32.

        If the conversion has a Plan, one graph of the net must have exactly the operators of the Plan: the first graph
        that is built for any root. If the Plan was tuned, it is the first that is built for any root while autograd is
        in the mode, training or inference, for which the Plan was tuned. In all other graphs, the Plan decides for
        operators with the same names and types as in the Plan, and the rules decide for all other operators. A graph
        without any operator of the Plan is refused.

        ``symbol`` is the FP32 graph of ``block``; ``params`` are the parameters that it reads, by name. ``device`` is
        ``"cpu"`` or ``"gpu"``. ``shapes`` maps the names of the inputs to their shapes in this call. ``large_inputs``:
        True if they are so large that some workarounds are left out (see ``pipeline.emitted``). ``adds_to_inputs``:
        True if MXNet may add the gradient of an input to the values that its gradient array holds already, as after
        ``attach_grad("add")`` or in control flow. False leaves out the workarounds for that. ``sparse`` has the names
        of the inputs that are sparse arrays in this call.

        Raises
        ------
        ValueError
            A parameter is float16, bfloat16 or a float64 that is trained; or an operator here reads one in FP32 or
            bfloat16 that only another net has stored in float16. Or the conversion has a Plan that was made for another
            net or device. Or MXNet cannot compute in the policy's dtype on ``device``, or the rule table lacks an
            operator.
        TypeError
            A parameter would be stored in float16, and MXNet's own Trainer holds it.
        """
        self.statistics.update({name: params[name] for name in symbol.list_auxiliary_states() if name in params})
        _check_dtypes(params.values(), allow_float64=False)
        tuned = None if self.plan is None else self.plan.tuned
        strict = id(block) in self._roots and not self._fits
        strict = strict and (tuned is None or tuned.training == autograd.is_training())
        # How the graphs of any of a parameter's nets have stored it. What this net's graphs decided overrules the rest.
        conversions = {name: [*reversed(conversions_of([param])), self] for name, param in params.items()}
        stored = {name: c.stored_low[name] for name in params for c in conversions[name] if name in c.stored_low}
        inputs = {} if adds_to_inputs else dict.fromkeys(shapes, "null")
        graph, planned = self.build(
            symbol,
            device,
            params,
            stored=stored,
            fixed={name for name, p in params.items() if overridden(p)} | self._fp32,
            constants={name for name, p in params.items() if isinstance(p, Constant)},
            reads_data=self.reads_data(block),
            strict=strict,
            grad_req={**inputs, **{name: requested_gradient(param) for name, param in params.items()}},
            large_inputs=large_inputs,
            training_shapes=shapes if autograd.is_training() else {},
            sparse={
                **dict.fromkeys(sparse, SPARSE),
                **{name: SPARSE_GRADIENT for name, p in params.items() if _mxnet.gradient_storage(p) != "default"},
            },
        )
        self._fits = self._fits or strict
        for name, param in params.items():
            if self.stored_low[name]:
                store_low(param, self.policy.compute)
        plan = replace(planned, blocks=prefixes_of(block))
        if id(block) in self._waiting:
            self._note_first_graph(block, plan)
        return graph, plan

    def reads_data(self, block: HybridBlock) -> bool:
        """Return whether ``block`` is the whole net, so that its inputs are data, and no features of another block."""
        return id(block) == self._whole

    def _note_first_graph(self, block: HybridBlock, plan: Plan) -> None:
        """Record that the root ``block`` has its first graph; if all roots have one, warn of faults.

        ``plan`` is the plan of that graph. A root is a block that runs as a graph and is called from Python code. The
        faults: no operator in the net computes in low precision; a pattern of ``exclude`` matches no operator and no
        block.
        """
        self._waiting.discard(id(block))
        self._unmatched = [pattern for pattern in self._unmatched if pattern in plan.unmatched]
        # A tuned plan without operators in low precision says that FP32 is faster.
        self._any_low = self._any_low or plan.num_low > 0 or plan.tuned is not None
        if self._waiting:
            return
        if not self._any_low:
            warnings.warn(
                f"nothing in {self._net!r} computes in {plan.policy.compute}: {NOTHING_LOW}; "
                "print(mxmp.explain(net)) says why",
                stacklevel=5,
            )
        if self._unmatched:
            warnings.warn(f"exclude: no node or block of {self._net!r} matches {self._unmatched}", stacklevel=5)

    def _decide(self, decided: Decider, device: str, undecided: set[str], low: set[str]) -> Plan:
        """Return the plan of one graph, which may read parameters that another converted net has stored in float16.

        ``decided(how, undecided, low)`` returns the plan under the Policy or Plan ``how``. ``low`` has the names of the
        parameters that are stored in float16 already, by this net or another one. ``undecided`` has the names of the
        parameters for which the plan may choose float16 or FP32. ``device`` is ``"cpu"`` or ``"gpu"``: some
        policies store parameters in float16 only on a GPU. A parameter that another net has stored in float16 stays in
        float16, even if this net's policy stores parameters in FP32. Raises ``ValueError`` if, under this net's policy
        or Plan, an operator of this graph reads it in another dtype.
        """
        stores = self.policy.stores_low(device)
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
        raise ValueError(
            f"Parameter {min(shared)!r} is shared with a net that was converted to store it in float16, and here "
            f"({self.policy}) it is read in another dtype: convert both nets with params='float32'"
        )


def requested_gradient(param: Parameter) -> str:
    """Return the ``grad_req`` of ``param``; ``"null"`` in inference that autograd does not record."""
    return param.grad_req if autograd.is_training() or autograd.is_recording() else "null"


def _check_dtypes(params: Iterable[Parameter], *, allow_float64: bool = True) -> None:
    """Raise ``ValueError`` if a parameter is float16 or bfloat16, or has float16 arrays without masters.

    With ``allow_float64=False``, also raises it if a parameter is float64 and trained (its ``grad_req`` is not
    ``"null"``). A ``LowParameter`` is accepted: mxmp stores it in float16, but its ``dtype`` is float32.
    """
    for param in params:
        dtype = np.dtype(param.dtype)
        is_trained_float64 = dtype == np.float64 and param.grad_req != "null"
        if dtype in (np.float16, BFLOAT16) or (is_trained_float64 and not allow_float64):
            raise ValueError(
                f"Parameter {param.name!r} is stored in {param.dtype}: convert takes an FP32 net and casts by itself; "
                "call net.cast('float32') first, and for another cast mxmp.restore(net)"
            )
        if not isinstance(param, LowParameter) and any(array.dtype == np.float16 for array in _mxnet.arrays(param)):
            raise ValueError(
                f"{type(param).__name__} {param.name!r} was made of the arrays of a Parameter that a converted net "
                "stores in float16, and lacks its FP32 master: make it before the first call of the net (as "
                "apply_weight_drop does), or call mxmp.restore(net) before, and mxmp.convert(net) after it"
            )


# The names of running statistics in MXNet's norm layers, for nets that have no graph of mxmp's.
_RUNNING = ("running_mean", "running_var")


def next_forward_number() -> int:
    """Add 1 to the count of training forwards that all converted nets share, and return the new count.

    A trainer calls this after each step, keeps the number, and passes it to ``running_statistics_of`` as ``since``:
    the forwards that begin later have higher numbers.
    """
    return next(_forwards)


def any_conversion() -> bool:
    """Return whether any net of this process is converted now."""
    return bool(_last_forward)


def running_statistics_of(params: Sequence[Parameter], since: int) -> list[Gradient]:
    """Return the running statistics that a trainer's next backward may overwrite: a (name, array) for each device.

    Parameters
    ----------
    params : sequence of Parameter
        The trainer's parameters. The result has those that are named ``*running_mean`` or ``*running_var`` and are not
        differentiable, and also all aux states of each converted net to which one of ``params`` belongs.
    since : int
        A number from ``next_forward_number``. The result also has the aux states of every converted net that began a
        forward in training mode after this number was taken. The backward may run through a net that another trainer
        updates: the backward of a GAN's generator runs through the discriminator.
    """
    ran = [conversion for conversion, last in list(_last_forward.items()) if last > since]
    found = {id(p): p for p in params if not _mxnet.is_differentiable(p) and p.name.endswith(_RUNNING)}
    for conversion in dict.fromkeys([*conversions_of(params), *sorted(ran, key=id)]):
        found.update((id(p), p) for p in conversion.statistics.values())
    return [Gradient(p.name, array) for p in found.values() for array in _mxnet.arrays(p)]
