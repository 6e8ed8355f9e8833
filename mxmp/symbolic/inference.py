"""The graph for inference of a module that only predicts: BatchNorm folded, fused, weights stored in bfloat16.
MXNet's own fusion by oneDNN is wrong for some graphs (``kernels/fusion.py``), and without it executors would be slower
than plain MXNet's. So forwards in inference mode run a second executor; the first one holds the parameters.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Collection

import mxnet as mx
from mxnet.ndarray import NDArray

from ..host.callbacks import last_line
from ..kernels.fusion import Unfused
from ..policy import Policy
from ..precision.casts import strip
from ..precision.graph import Graph
from ..precision.plan import Plan
from ..serving.folding import Params, folded_norms, without_identities
from ..serving.lowering import lower

logger = logging.getLogger("mxmp")


class InferenceGraph:
    """A fused graph for inference on one device, with BatchNorm folded and weights in bfloat16 where it computes so."""

    def __init__(self, symbol: mx.sym.Symbol, how: Policy | Plan, parameters: Collection[str]) -> None:
        self._symbol = symbol
        # The folded graph may have operators that the module's plan lacks: for these the rules decide.
        self._policy, self._decided = (how.policy, how.decisions) if isinstance(how, Plan) else (how, {})
        self._parameters = parameters
        self._computed: tuple[mx.sym.Symbol, Params] | None = None

    @property
    def is_computed(self) -> bool:
        return self._computed is not None

    def forget(self) -> None:
        """Drop folded and cast parameters, as the module's own have changed."""
        self._computed = None

    def bind(self, executor: mx.executor.Executor) -> mx.executor.Executor:
        """Return a new executor, which reads the inputs of the module's ``executor`` and shares its memory.
        The first call, and the first after ``forget``, waits for the parameters, folds BatchNorm and casts."""
        arrays = {**executor.arg_dict, **executor.aux_dict}
        if self._computed is None:
            self._computed = self._compute({name: arrays[name].as_in_context(mx.cpu()) for name in self._parameters})
        symbol, params = self._computed
        context = next(iter(arrays.values())).context
        placed = {**arrays, **{name: value.as_in_context(context) for name, value in params.items()}}
        args, states = symbol.list_arguments(), symbol.list_auxiliary_states()
        return Unfused(symbol).bind(
            context,
            {name: placed[name] for name in args},
            grad_req="null",
            aux_states={name: placed[name] for name in states},
            shared_exec=executor,
        )

    def executor(
        self,
        executor: Any,
        knows_changes: Callable[[], bool],  # whether all that can change the parameters calls ``forget``
        forget: Callable[[], None],  # for all graphs with copies of the executor's arrays
    ) -> InferenceExecutor:
        """Return what stands in for a module's executor: that itself if it does so already, as after ``reshape``."""
        is_one = isinstance(executor, InferenceExecutor)
        return executor if is_one else InferenceExecutor(executor, self, knows_changes, forget)

    def _compute(self, params: Params) -> tuple[mx.sym.Symbol, Params]:
        network = without_identities(strip(Graph.from_symbol(self._symbol)))
        graph, params = lower(*folded_norms(network, params), policy=self._policy, decided=self._decided)
        return graph.to_symbol(), params


class InferenceExecutor:
    """Stands in for a module's executor, and runs forwards in inference mode in its faster ``InferenceGraph``."""

    def __init__(
        self,
        executor: mx.executor.Executor,
        graph: InferenceGraph,
        knows_changes: Callable[[], bool],  # as of ``InferenceGraph.executor``
        forget: Callable[[], None],
    ) -> None:
        self._executor = executor
        self._graph = graph
        self._knows_changes = knows_changes
        self._forget = forget
        self._fused: mx.executor.Executor | None = None
        self._latest = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    @property
    def outputs(self) -> list[NDArray]:
        return self._latest.outputs

    def forward(self, is_train: bool = False, **kwargs: Any) -> list[NDArray]:
        if is_train:
            self._forget()  # running statistics may change
        self._latest = self._executor
        if not is_train and not kwargs and self._knows_changes():
            self._latest = self._current()
        return self._latest.forward(is_train, **kwargs)

    def _current(self) -> mx.executor.Executor:
        """Return the executor of the InferenceGraph, bound anew after ``forget``; or the module's if that fails."""
        if self._fused is None or not self._graph.is_computed:
            try:
                self._fused = self._graph.bind(self._executor)
            except mx.MXNetError as error:
                self._knows_changes = lambda: False
                why = last_line(error)
                logger.warning("MXNet cannot fuse this module's graph: it predicts by that with casts: %s", why)
                return self._executor
        return self._fused
