"""The graph for inference of a module that only predicts: BatchNorm folded, fused, weights stored in bfloat16.

``mx.mod.Module`` lets MXNet fuse the graph of such a module by oneDNN. That is wrong for some graphs, so mxmp binds
executors without it (``kernels/fusion.py``), and they would be slower than plain MXNet's. Forwards in inference mode
therefore run a second executor, whose graph is fused where that is right and reads weights that were folded and cast
once. The first executor stays the one that holds the parameters.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Collection

import mxnet as mx
from mxnet.ndarray import NDArray

from ..callbacks import last_line
from ..kernels.fusion import Unfused
from ..policy import Policy
from ..precision.casts import strip
from ..precision.graph import Graph
from ..precision.plan import Plan
from ..serving.folding import Params, folded_norms, without_identities
from ..serving.lowering import lower

logger = logging.getLogger("mxmp")


class InferenceGraph:
    """A fused graph for inference on one device, with BatchNorm folded and weights of bfloat16 operators in bfloat16.

    ``bind`` computes the graph's parameters from those of the module's executor: at its first call, and again after
    ``forget``. ``symbol`` is the user's FP32 Symbol, ``parameters`` the names of its parameters and auxiliary states.
    If ``how`` is a policy of bfloat16, the rules decide each operator's dtype in the folded graph, where more operators
    may be in bfloat16 than in the module's plan. If ``how`` is a Plan, it decides for the operators that have the same
    name and type in it, and the rules decide for all others.
    """

    def __init__(self, symbol: mx.sym.Symbol, how: Policy | Plan, parameters: Collection[str]) -> None:
        self._symbol = symbol
        self._policy, self._decided = (how.policy, how.decisions) if isinstance(how, Plan) else (how, {})
        self._parameters = parameters
        self._computed: tuple[mx.sym.Symbol, Params] | None = None

    @property
    def is_computed(self) -> bool:
        """Return whether there are folded and cast parameters: False before ``bind``, and after ``forget``."""
        return self._computed is not None

    def forget(self) -> None:
        """Drop the folded and cast parameters; call it when the module's own parameters have changed."""
        self._computed = None

    def bind(self, executor: mx.executor.Executor) -> mx.executor.Executor:
        """Return a new executor of the graph for inference, which reads the input arrays of the module's ``executor``.

        The new executor shares ``executor``'s memory for intermediate tensors. The first call, and the first after
        ``forget``, waits for the parameters of ``executor``, folds BatchNorm into copies of them and casts the copies.
        """
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

    def _compute(self, params: Params) -> tuple[mx.sym.Symbol, Params]:
        """Return the fused Symbol and its parameters by name, computed from ``params``, those of the FP32 Symbol."""
        network = without_identities(strip(Graph.from_symbol(self._symbol)))
        graph, params = lower(*folded_norms(network, params), policy=self._policy, decided=self._decided)
        return graph.to_symbol(), params


class InferenceExecutor:
    """Stands in for a module's executor, and runs forwards in inference mode in its faster ``InferenceGraph``.

    Parameters
    ----------
    executor : Executor
        The module's own, which holds the parameters and inputs. It runs forwards in training mode, those that get
        inputs as keyword arguments, and all others while ``is_safe`` returns False. Attributes that are not defined
        here are those of ``executor``.
    graph : InferenceGraph
        Runs the remaining forwards.
    is_safe : callable
        Returns True if nothing can change the executor's parameters without a call of ``graph.forget``.
    forget : callable
        Calls ``forget`` of all graphs that have copies of the executor's arrays. Forwards in training mode call it,
        since they may change running statistics.
    """

    def __init__(
        self,
        executor: mx.executor.Executor,
        graph: InferenceGraph,
        is_safe: Callable[[], bool],
        forget: Callable[[], None],
    ) -> None:
        self._executor = executor
        self._graph = graph
        self._is_safe = is_safe
        self._forget = forget
        self._fused: mx.executor.Executor | None = None
        self._latest = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    @property
    def outputs(self) -> list[NDArray]:
        """Return the outputs of the last forward, by the module's executor or by the InferenceGraph."""
        return self._latest.outputs

    def forward(self, is_train: bool = False, **kwargs: Any) -> list[NDArray]:
        """Run forward, with the arguments of ``Executor.forward``, and return the outputs.

        The module's executor runs if ``is_train`` is True, if inputs are passed as keyword arguments, if ``is_safe()``
        is False, or if MXNet could not bind the InferenceGraph. Otherwise the InferenceGraph runs.
        """
        if is_train:
            self._forget()
        self._latest = self._executor
        if not is_train and not kwargs and self._is_safe():
            self._latest = self._current()
        return self._latest.forward(is_train, **kwargs)

    def _current(self) -> mx.executor.Executor:
        """Return the executor of the InferenceGraph; bind it at the first call, and anew after the graph's ``forget``.

        If MXNet cannot bind the graph, logs a warning and returns the module's executor, which runs all later forwards.
        """
        if self._fused is None or not self._graph.is_computed:
            try:
                self._fused = self._graph.bind(self._executor)
            except mx.MXNetError as error:
                self._is_safe = lambda: False
                why = last_line(error)
                logger.warning("MXNet cannot fuse this module's graph: it predicts by that with casts: %s", why)
                return self._executor
        return self._fused
