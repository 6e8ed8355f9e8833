"""``Prepared``, which runs a served graph as it was timed: with weights that are prepared once, not at each call.

oneDNN's fused operators reorder or quantize their weights when they first run, and keep the result as long as MXNet
keeps the operator's state. A CachedOp with ``static_shape`` keeps it until the shapes of the inputs change, without
``static_shape`` for one call only. An executor, which has one set of shapes, keeps it for good.
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
    """Runs a graph for inference, and keeps it prepared for each of the last four shapes of its inputs.

    Threads may call one object; their calls are passed to MXNet one after another.

    Parameters
    ----------
    graph : Graph
    inputs : list of Symbol
        The variables of its inputs, in the order of the arrays of a call.
    params : ParameterDict
        Its parameters and auxiliary states. Their values must not change: oneDNN's fused operators keep what they
        prepared from the first values, and would not notice new ones.
    """

    def __init__(self, graph: Graph, inputs: list[mx.sym.Symbol], params: ParameterDict) -> None:
        self._symbol, self._inputs, self._params = graph.to_symbol(), inputs, params
        self._has_loops = has_control_flow(graph)
        # From shapes, dtypes and context of the inputs to what runs the graph for them, the last used at the end.
        self._kept: dict[tuple, Callable[..., Any]] = {}

    def __call__(self, arrays: Sequence[NDArray]) -> Any:
        """Run the graph on ``arrays``, one for each input, and return its output or the list of its outputs."""
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
        """Return a function that runs the graph by a new CachedOp, with ``static_alloc`` and ``static_shape``.

        It takes one array for each input, as separate arguments, and returns what ``__call__`` returns.
        """
        block = SymbolBlock(self._symbol, self._inputs, params=self._params)
        block.hybridize(static_alloc=True, static_shape=True)
        return block.__call__

    def _bound(self, arrays: Sequence[NDArray]) -> Callable[..., Any]:
        """Return a function that runs a graph with control flow by an executor, as ``_compiled`` does by a CachedOp.

        Its arguments must have the shapes and the context of ``arrays``. A CachedOp would need ``static_shape``, with
        which MXNet gives wrong results for such graphs (``has_control_flow``).
        """
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
