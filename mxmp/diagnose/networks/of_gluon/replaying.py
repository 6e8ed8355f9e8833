"""A net whose graphs other graphs stand in for while a batch is replayed, for ``audit``."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Collection, Iterator, Sequence

import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, Constant, HybridBlock, Parameter
from mxnet.ndarray import NDArray

from ....gluon import _mxnet
from ....gluon.blocks import blocks_of
from ....gluon.hook import Hook, hooks, standing_in
from ....gluon.nesting import key_of, nesting_of, split
from ....gluon.parameter import weight_of
from ....gluon.symbols import TracedCall, traced_call
from ....kernels.fit import device_of
from ....pipeline import Conversion, Use, emulated
from ....policy import Policy
from ....precision.graph import Graph
from ....precision.operators import non_fp32
from ....precision.plan import Plan
from ....step.gradients import listed
from ..protocol import GraphRunner, ReplayedGraph
from .training import check_exclusion, exclude_operators, trainers_of
from .undoing import without_trace


class ReplayedNet:
    """A net with a batch and its loss; implements ``protocol.ReplayedNetwork``. ``how`` is None if it is converted.
    ``data`` are its arguments, ``labels`` those of ``loss`` after the output; without a loss it runs in inference mode.
    Other converted nets that the loss calls are replayed too."""

    def __init__(
        self, net: Block, loss: Callable | None, data: Sequence[Any], labels: Sequence[Any], how: Policy | Plan | None
    ) -> None:
        converted = any(hooks(net))
        if converted and how is not None:
            raise ValueError(
                f"{net.name!r} is converted already: audit it without a policy, or mxmp.restore(net) first"
            )
        if not converted and (how is None or not isinstance(net, HybridBlock)):
            raise ValueError(f"{net.name!r} is not converted: call mxmp.convert(net) first, or pass a policy or Plan")
        waiting = [p.name for p in net.collect_params().values() if not _mxnet.is_initialized(p)]
        if waiting:
            raise ValueError(f"Parameter {waiting[0]!r} has no values yet: initialize the net, and call it once")
        self._net, self._loss, self._data, self._labels = net, loss, _detached(data), _detached(labels)
        self._given = how
        self._own = set(map(id, blocks_of(net)))
        self._known: dict[tuple, tuple[TracedCall, ReplayedGraph]] = {}
        # Of each graph by its number: the net to which ``exclude`` applies.
        self._nets: list[Block] = []

    @property
    def training(self) -> bool:
        return self._loss is not None

    def replay(self, run: GraphRunner) -> tuple[list[NDArray], list[NDArray]]:
        def stand_in(block: HybridBlock, hook: Hook | None, args: tuple) -> Any:
            call, graph = self._graph(block, hook, args)
            return call.answered(run(graph, call.inputs))

        mode = autograd.record() if self.training else autograd.pause(train_mode=False)
        with standing_in(stand_in), mode:
            out = self._net(*self._data) if self._given is None else stand_in(self._net, None, tuple(self._data))
            found = self._loss(out, *self._labels) if self._loss is not None else []
        outputs: list[NDArray] = []
        nesting_of(out, outputs)
        return outputs, listed(found)

    def _graph(self, block: HybridBlock, hook: Hook | None, args: tuple) -> tuple[TracedCall, ReplayedGraph]:
        """Return the graph of one call with the arrays of this call; trace it at the first such call."""
        arrays, constants = split(args)
        flat, structure = _mxnet.flatten(arrays)
        key = (id(block), repr(structure), key_of(constants))
        inputs = [array for array in flat if array is not None]
        if key in self._known:
            call, graph = self._known[key]
            return call._replace(inputs=dict(zip(call.inputs, inputs))), graph
        call = traced_call(block, args, autograd.is_training())
        ctx = inputs[0].ctx
        if hook is not None:
            conversion: Conversion = hook.conversion
        elif self._given is not None:
            conversion = Conversion(emulated(self._given, device_of(ctx)))
        reads_data = hook is None or hook.conversion.reads_data(block)
        fixed = frozenset(name for name, param in call.params.items() if isinstance(param, Constant))

        use = Use(
            device_of(ctx),
            call.params.keys() - fixed,
            training_shapes={name: array.shape for name, array in call.inputs.items()} if self.training else {},
            non_fp32=non_fp32(call.inputs),
            reads_data=reads_data,
        )

        def planned(conversion: Conversion) -> Plan:
            return conversion.preview(Graph.from_symbol(call.symbol), use)

        trained = frozenset(name for name, param in call.params.items() if param.grad_req != "null")
        values = {name: _value(param, ctx) for name, param in call.params.items()}
        other = "" if id(block) in self._own else block.name
        graph = ReplayedGraph(
            *(len(self._known), call.symbol, planned(conversion), values, trained, fixed, self.training),
            excluding=lambda names: planned(conversion.excluding(names)),
            other=other,
            reads_data=reads_data and not other,
        )
        self._nets.append(block if other else self._net)
        self._known[key] = call, graph
        return call, graph

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore attributes that the code of net and loss sets, and running statistics of blocks run as Python."""
        with without_trace(self._net, self._loss):
            yield

    def check_excludable(self) -> None:
        if self._given is not None:
            raise ValueError("apply=True needs a net that mxmp.convert has converted")
        check_exclusion(self._net, trainers_of(self._net))

    def exclude(self, operators: Collection[tuple[int, str]]) -> None:
        found: dict[int, tuple[Block, list[str]]] = {}
        for number, name in operators:
            net = self._nets[number]
            found.setdefault(id(net), (net, []))[1].append(name)
        for net, _ in found.values():
            check_exclusion(net, trainers_of(net))
        for net, names in found.values():
            exclude_operators(net, names)


def _detached(value: Any) -> Any:
    """Return a nested list of arrays without what autograd knows of them: a replay writes no gradients of a batch."""
    if isinstance(value, (list, tuple)):
        return [*map(_detached, value)] if isinstance(value, list) else tuple(map(_detached, value))
    return value.detach() if isinstance(value, NDArray) else value


def _value(param: Parameter, ctx: Any) -> NDArray:
    """Return a copy of the value of ``param`` on ``ctx``: its FP32 master if it has one."""
    weight = weight_of(param)
    array = next(each for each in (weight.masters or weight.arrays) if each.ctx == ctx)
    with autograd.pause():
        return array.astype("float32") if array.dtype == np.float16 else array.copy()
