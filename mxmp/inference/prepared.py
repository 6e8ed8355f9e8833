"""``Prepared``, which runs a served graph as it was timed: with weights that are prepared once, not at each call.

oneDNN's fused operators keep prepared weights in MXNet's operator state. A CachedOp with ``static_shape`` has it until
input shapes change, without ``static_shape`` for one call; an executor, which has one set of shapes, for good.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet.gluon import ParameterDict, SymbolBlock
from mxnet.ndarray import NDArray

from ..gluon.graphs import engine_lock
from ..kernels.fusion import Unfused
from ..precision.graph import Graph
from ..precision.subgraphs import has_control_flow

# For so many shapes of the inputs, those of the latest calls, the graph stays prepared. Each has its own weights.
KEPT_SHAPES = 4


class Prepared:
    """Runs a graph for inference; threads may call one object, and their calls go one after another.
    Values of ``params`` must not change: oneDNN's fused operators would not notice."""

    def __init__(self, graph: Graph, inputs: list[mx.sym.Symbol], params: ParameterDict) -> None:
        self._symbol, self._inputs, self._params = graph.to_symbol(), inputs, params
        self._has_loops = has_control_flow(graph)
        # From shapes, dtypes and context of the inputs to what runs the graph for them, the last used at the end.
        self._kept: dict[tuple, Callable[..., Any]] = {}

    def __call__(self, arrays: Sequence[NDArray]) -> Any:
        """Return the output, or the list of outputs, for one array for each of the inputs."""
        with engine_lock():
            key: tuple = tuple((array.shape, array.dtype, array.context) for array in arrays)
            if self._has_loops:  # an executor reads the arrays that it was bound with
                key += tuple(id(param.data(arrays[0].context)) for param in self._params.values())
            run = self._kept.pop(key, None) or (self._bound(arrays) if self._has_loops else self._compiled())
            self._kept[key] = run
            if len(self._kept) > KEPT_SHAPES:
                del self._kept[next(iter(self._kept))]
            return run(*arrays)

    def _compiled(self) -> Callable[..., Any]:
        block = SymbolBlock(self._symbol, self._inputs, params=self._params)
        block.hybridize(static_alloc=True, static_shape=True)
        return block.__call__

    def _bound(self, arrays: Sequence[NDArray]) -> Callable[..., Any]:
        """Return a function that runs a graph with control flow for arrays of these shapes and this context."""
        # By an executor: with static_shape, MXNet gives wrong results for control flow (has_control_flow).
        context = arrays[0].context
        known = {name: param.data(context) for name, param in self._params.items()}
        known.update((variable.name, array.copy()) for variable, array in zip(self._inputs, arrays))
        arguments = {name: known[name] for name in self._symbol.list_arguments()}
        states = {name: known[name] for name in self._symbol.list_auxiliary_states()}
        symbol = Unfused(self._symbol) if context.device_type == "cpu" else self._symbol
        executor = symbol.bind(context, arguments, grad_req="null", aux_states=states)

        def run(*inputs: NDArray) -> Any:
            for variable, array in zip(self._inputs, inputs):
                if variable.name in arguments:
                    array.copyto(arguments[variable.name])
            outputs = [output.copy() for output in executor.forward(is_train=False)]
            return outputs if len(outputs) > 1 else outputs[0]

        return run
