"""A module or a Symbol whose graph other graphs stand in for while a batch is replayed, for ``audit``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, Collection, ContextManager, Mapping

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ....kernels.fit import device_of
from ....pipeline import Conversion, Use, emulated
from ....policy import Policy
from ....precision.graph import Graph
from ....precision.heads import has_loss_head
from ....precision.operators import non_fp32
from ....precision.plan import Plan
from ....step.gradients import listed
from ....symbolic import _mxnet
from ....symbolic.bucketing import BucketingModule
from ....symbolic.module import Module
from ..protocol import OTHER_WORKERS, GraphRunner, ReplayedGraph
from .training import exclude_operators


class ReplayedSymbol:
    """A graph with its parameters and a batch by names; implements ``protocol.ReplayedNetwork``.
    Gradients are those of loss heads, or of ``loss(outputs, *labels)``, or of the sum of all outputs."""

    def __init__(
        self, graph: ReplayedGraph, inputs: Mapping[str, NDArray], loss: Callable | None, labels: Collection[NDArray]
    ) -> None:
        self._graph, self._inputs, self._loss, self._labels = graph, inputs, loss, labels

    @property
    def training(self) -> bool:
        return self._graph.training

    def replay(self, run: GraphRunner) -> tuple[list[NDArray], list[NDArray]]:
        with autograd.record() if self.training else autograd.pause(train_mode=False):
            outs = run(self._graph, self._inputs)
            found = self._loss(outs, *self._labels) if self._loss is not None else []
        return outs, listed(found)

    def unchanged(self) -> ContextManager[None]:
        return nullcontext()

    def check_excludable(self) -> None:
        raise ValueError("apply=True needs a converted net or a module: a Symbol is converted by cast_symbol(exclude=)")

    def exclude(self, operators: Collection[tuple[int, str]]) -> None:
        self.check_excludable()


class ReplayedModule(ReplayedSymbol):
    """A bound module with a DataBatch. Of a BucketingModule, switches to the bucket of the batch."""

    def __init__(self, target: Module | BucketingModule, loss: Callable | None, batch: Any) -> None:
        if not (target.binded and target.params_initialized):
            raise ValueError("the module has no parameters yet: bind and init_params first")
        module = target
        if isinstance(target, BucketingModule):
            target.switch_bucket(batch.bucket_key, batch.provide_data, batch.provide_label)
            module = _mxnet.current(target)
        self._target, self._module = target, module
        plan = module.plan
        if plan is None:
            raise ValueError("the module has no graph yet: bind it first")
        executor = _mxnet.group(module).execs[0]
        values = {w.name: _full((w.masters or w.arrays)[0]) for w in module.core.weights(module.arrays())}
        values.update({name: _full(array) for name, array in executor.aux_dict.items()})
        named = zip([*module.data_names, *module.label_names], [*batch.data, *(batch.label or ())])
        read = set(module.symbol.list_inputs())
        ctx = next(iter(values.values())).ctx if values else batch.data[0].ctx
        inputs = {name: array.as_in_context(ctx) for name, array in named if name in read}
        executors = _mxnet.group(module).execs
        for name in read - inputs.keys() - values.keys():  # states (``state_names``), and labels that the batch lacks
            inputs[name] = mx.nd.concat(*(each.arg_dict[name].as_in_context(ctx) for each in executors), dim=0)
        trained = frozenset(name for name, array in executor.grad_dict.items() if array is not None and name in values)
        use = Use(
            device_of(ctx),
            module.symbol.list_arguments(),
            training_shapes={name: array.shape for name, array in inputs.items()} if module.for_training else {},
            non_fp32=non_fp32(inputs),
            keep_output_names=True,
        )

        def excluding(names: Collection[str]) -> Plan:
            return module.core.conversion.excluding(names).preview(Graph.from_symbol(module.symbol), use)

        graph = ReplayedGraph(
            *(0, module.symbol, plan, values, trained, frozenset(), module.for_training), excluding=excluding
        )
        super().__init__(graph, inputs, loss, [array.as_in_context(ctx) for array in batch.label or ()])

    def check_excludable(self) -> None:
        if self._module.has_other_workers:
            raise ValueError(OTHER_WORKERS)

    def exclude(self, operators: Collection[tuple[int, str]]) -> None:
        exclude_operators(self._target, self._module, [name for _, name in operators])


def replayed_symbol(
    symbol: mx.sym.Symbol,
    params: Mapping[str, NDArray],
    batch: Mapping[str, NDArray],
    loss: Callable | None,
    how: Policy | Plan,
) -> ReplayedSymbol:
    """Return a ReplayedSymbol for an FP32 ``symbol``, with ``params`` by names such as ``"arg:fc_weight"``."""
    values = {name.partition(":")[2] or name: _full(array) for name, array in params.items()}
    missing = [name for name in symbol.list_inputs() if name not in values and name not in batch]
    if missing:
        raise ValueError(f"the Symbol's input {missing[0]!r} is neither in the batch nor in the parameters")
    inputs = {name: batch[name] for name in symbol.list_inputs() if name in batch}
    values = {name: values[name] for name in symbol.list_inputs() if name not in inputs}
    training = loss is not None or has_loss_head(Graph.from_symbol(symbol))
    ctx = next(iter({**inputs, **values}.values())).ctx
    use = Use(
        device_of(ctx),
        symbol.list_arguments(),
        training_shapes={name: array.shape for name, array in inputs.items()} if training else {},
        non_fp32=non_fp32(inputs),
        keep_output_names=True,
    )
    conversion = Conversion(emulated(how, use.device))

    def planned(conversion: Conversion) -> Plan:
        return conversion.preview(Graph.from_symbol(symbol), use)

    trained = frozenset(symbol.list_arguments()) & values.keys()
    graph = ReplayedGraph(
        *(0, symbol, planned(conversion), values, trained, frozenset(), training),
        excluding=lambda names: planned(conversion.excluding(names)),
    )
    return ReplayedSymbol(graph, inputs, loss, ())


def _full(array: NDArray) -> NDArray:
    return array.astype("float32") if array.dtype == np.float16 else array.copy()
