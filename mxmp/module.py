"""``Module``: MXNet's own, computing in low precision and stepping safely.

The module's ``symbol``, its parameters and its checkpoints are the user's, in FP32. Executors are bound
to a private symbol with casts and, in front of loss heads, the loss scale.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from typing import Any, Iterator

import mxnet as mx
from mxnet.ndarray import NDArray

from .gradients import Gradient
from .graph import Graph
from .heads import SCALE_NAME, scale_heads
from .kvstores import check_kvstore, refuse_compression, refuse_sparse_weight
from .lower import device_of, low_graph
from .masters import Updater, share_initial, take_over
from .module_states import load, save
from .plan import check_policy
from .policy import Policy, as_policy
from .rewrite import declare_full
from .running import RunningStatistics, watching
from .scaler import as_scaler
from .states import replacing
from .step import ScaledStep, StepView, rescaled

__all__ = ["Module"]


class Module(StepView, mx.mod.Module):
    """``mx.mod.Module`` in mixed precision: the same constructor and methods, two more keywords.

    Parameters
    ----------
    symbol, data_names, label_names, ...
        As for ``mx.mod.Module``. ``compression_params`` is refused.
    policy : str or Policy
        ``"float16"``, ``"bfloat16"``, a policy string or a Policy.
    loss_scale : {"dynamic"}, float, None or a scaler
        As for ``mxmp.Trainer``. It multiplies whatever ``grad_scale`` the heads have, and is divided out
        through the optimizer's ``rescale_grad``, on top of the user's.

    Raises
    ------
    ValueError
        The policy cannot hold, or an argument would apply gradients before they are checked.
    """

    def __init__(
        self,
        symbol: mx.sym.Symbol,
        *args: Any,
        policy: str | Policy = "float16",
        loss_scale: Any = "dynamic",
        **kwargs: Any,
    ) -> None:
        self.policy = as_policy(policy)
        self._symbol: Any
        self._arg_params: Any
        self._params_dirty: bool
        self._preload_opt_states: str | None
        super().__init__(symbol, *args, **kwargs)
        self._device = device_of(self._context[0])
        check_policy(self.policy, self._device)
        refuse_compression(self._compression_params)
        low_range = self.policy.compute == "float16"
        self._core = Core(ScaledStep(as_scaler(loss_scale, low_range=low_range)))
        self._statistics: RunningStatistics | None = None

    @classmethod
    def load(cls, prefix: str, epoch: int, load_optimizer_states: bool = False, **kwargs: Any) -> Module:
        """``mx.mod.Module.load`` for this class; takes ``policy`` and ``loss_scale`` too."""
        symbol, args, auxs = mx.model.load_checkpoint(prefix, epoch)
        module = cls(symbol, **kwargs)
        module._arg_params, module._aux_params = args, auxs
        module.params_initialized = True
        if load_optimizer_states:
            module._preload_opt_states = f"{prefix}-{epoch:04d}.states"
        return module

    # -- binding and parameters ---------------------------------------------------------------------

    def bind(
        self,
        data_shapes: Any,
        label_shapes: Any = None,
        for_training: bool = True,
        inputs_need_grad: bool = False,
        force_rebind: bool = False,
        shared_module: Module | None = None,
        grad_req: Any = "write",
    ) -> None:
        """As ``mx.mod.Module.bind``; the executors get the graph with casts."""
        if shared_module is not None:
            self._core = shared_module._core
        fresh = self._arg_params is None
        original = self._symbol
        if force_rebind or not self.binded:
            self._symbol = self._low_symbol(for_training)
        # oneDNN's fusion is wrong for inference where a convolution feeds an activation and a skip: 7 % off in
        # bfloat16 on a ResNet-50 v2, against 0.5 % without it.
        backend = "MXNET_SUBGRAPH_BACKEND"
        unfused = nullcontext() if backend in os.environ else _environment(backend, "NONE")
        try:
            with unfused:
                super().bind(
                    data_shapes, label_shapes, for_training, inputs_need_grad, force_rebind, shared_module, grad_req
                )
        finally:
            self._symbol = original
        if fresh and shared_module is None:
            for name in self._core.low_names & set(self._param_names):
                self._arg_params[name] = mx.nd.zeros(self._arg_params[name].shape)
        self._statistics = None

    def _low_symbol(self, for_training: bool) -> mx.sym.Symbol:
        core = self._core
        graph, plan = low_graph(
            Graph.from_symbol(self._symbol),
            self.policy,
            self._device,
            parameters=() if core.decided else set(self._param_names),
            stored_low=core.low_names,
            keep_output_names=True,
        )
        if not core.decided:
            core.decided, core.low_names = True, {variable.name for variable in plan.low_variables}
        if for_training:
            scale_heads(graph)
        declare_full(graph)
        return graph.to_symbol()

    def init_params(self, *args: Any, **kwargs: Any) -> None:
        super().init_params(*args, **kwargs)
        self._refresh_masters(self._arg_params)

    def set_params(
        self,
        arg_params: dict,
        aux_params: dict,
        allow_missing: bool = False,
        force_init: bool = True,
        allow_extra: bool = False,
    ) -> None:
        """As ``mx.mod.Module.set_params``: FP32 values, straight into the masters."""
        super().set_params(arg_params, aux_params, allow_missing, force_init, allow_extra)
        if allow_missing:
            given = {k: v for k, v in (arg_params or {}).items() if k in self._core.low_names}
            for name, value in given.items():
                self._arg_params[name][:] = value
            self._refresh_masters(given)

    def _refresh_masters(self, values: dict) -> None:
        for name, masters in self._core.masters.items():
            if name in values:
                for master in masters:
                    master[:] = values[name]

    def _sync_params_from_devices(self) -> None:
        low = {name: self._arg_params[name].copy() for name in self._core.low_names}
        super()._sync_params_from_devices()
        arrays = self._arrays()
        for name, value in low.items():
            masters = self._core.masters.get(name)
            if masters is None:
                self._arg_params[name] = value
                continue
            for master, array in zip(masters, arrays[name]):
                take_over(master, array)
            total = mx.nd.add_n(*(m.as_in_context(mx.cpu()) for m in masters))
            self._arg_params[name][:] = total / len(masters)

    def _arrays(self) -> dict[str, list[NDArray]]:
        """What the executors compute with: by parameter, one array per device."""
        return dict(zip(self._exec_group.param_names, self._exec_group.param_arrays))

    # -- optimizer ----------------------------------------------------------------------------------

    def init_optimizer(
        self,
        kvstore: Any = "local",
        optimizer: Any = "sgd",
        optimizer_params: Any = (("learning_rate", 0.01),),
        force_init: bool = False,
    ) -> None:
        """As ``mx.mod.Module.init_optimizer``, never updating on the kvstore.

        Raises
        ------
        ValueError
            For ``dist_async``, which applies gradients before any check.
        """
        if self.optimizer_initialized and not force_init:
            self.logger.warning("optimizer already initialized, ignoring...")
            return
        check_kvstore(kvstore)
        arrays = self._arrays()
        for name, copies in arrays.items():
            refuse_sparse_weight(name, copies[0].stype)
        if self._params_dirty:
            self._sync_params_from_devices()
        preload, self._preload_opt_states = self._preload_opt_states, None
        # Only so does MXNet leave the update to us, dist_sync included.
        with _environment("MXNET_UPDATE_ON_KVSTORE", "0"), self._keys_as_gradients():
            super().init_optimizer(kvstore, optimizer, optimizer_params, force_init)
        self._core.masters = {
            name: [self._arg_params[name].as_in_context(a.ctx).copy() for a in copies]
            for name, copies in arrays.items()  # in one order on all workers, who number their keys by it
            if name in self._core.low_names
        }
        self._core.index = {name: i for i, name in enumerate(self._exec_group.param_names)}
        names, devices, core = self._exec_group.param_names, len(self._context), self._core

        def master_of(key: int) -> NDArray | None:
            index, device = divmod(key, devices)
            masters = core.masters.get(names[index])
            return None if masters is None else masters[device]

        self._updater = Updater(self._optimizer, master_of)
        if self._kvstore is not None and "dist" in self._kvstore.type:
            self._share_initial(arrays)
        if preload is not None:
            self.load_optimizer_states(preload)

    @contextmanager
    def _keys_as_gradients(self) -> Iterator[None]:
        """Keys of the kvstore must have the gradients' dtype: an FP32 key fed with float16 hangs the job."""
        original = self._arg_params
        self._arg_params = {
            k: v.astype(self.policy.compute) if k in self._core.low_names else v for k, v in original.items()
        }
        try:
            yield
        finally:
            self._arg_params = original

    def _share_initial(self, arrays: dict[str, list[NDArray]]) -> None:
        """MXNet's Module never sends rank 0's parameters to the other workers."""
        masters = self._core.masters
        for name, copies in arrays.items():
            if name not in masters:
                self._kvstore.broadcast(f"{name}:initial", self._arg_params[name], copies)
        low = {f"{name}:initial": (full, arrays[name]) for name, full in masters.items()}
        share_initial(self._kvstore, low, [array for copies in arrays.values() for array in copies])
        self._params_dirty = True

    # -- one step -----------------------------------------------------------------------------------

    def backward(self, out_grads: Any = None) -> None:
        """As ``mx.mod.Module.backward``, of everything times the loss scale."""
        scale = self.loss_scale
        self._core.scaled_by = scale
        for executor in self._exec_group.execs:
            if SCALE_NAME in executor.arg_dict:
                executor.arg_dict[SCALE_NAME][:] = scale
        if out_grads is not None:
            out_grads = [g * scale for g in ([out_grads] if isinstance(out_grads, NDArray) else out_grads)]
        self._watch_statistics()
        super().backward(out_grads)

    def update(self) -> None:
        """Reduce, check, and update, or skip. Synchronizes once.

        Raises
        ------
        FloatingPointError
            Repeated overflow at the lowest scale; names the parameters.
        """
        group = self._exec_group
        live = [
            (self._core.index[name], name, weights, grads)
            for name, weights, grads in zip(group.param_names, group.param_arrays, group.grad_arrays)
            if grads[0] is not None
        ]
        self._params_dirty = True
        if self._kvstore is not None:
            for i, name, _, grads in live:
                self._kvstore.pushpull(name, grads, priority=-i)
        devices = len(self._context)

        def apply() -> None:
            with rescaled(self._optimizer, 1.0 / self._core.scaled_by):
                for k in range(devices):
                    self._updater(
                        [i * devices + k for i, *_ in live],
                        [grads[k] for *_, grads in live],
                        [weights[k] for _, _, weights, _ in live],
                    )

        gradients = [Gradient(name, grad) for _, name, _, grads in live for grad in grads]
        if gradients:
            self._state.run(gradients, apply, self._statistics)

    def get_input_grads(self, merge_multi_context: bool = True) -> list:
        """As ``mx.mod.Module.get_input_grads``: the true gradients, unscaled copies."""
        found = super().get_input_grads(merge_multi_context)
        factor = 1.0 / self._core.scaled_by
        return [g * factor if isinstance(g, NDArray) else [each * factor for each in g] for g in found]

    @property
    def _state(self) -> ScaledStep:
        return self._core.step

    def _watch_statistics(self) -> None:
        group = self._exec_group
        items = [Gradient(n, a) for n, arrays in zip(group.aux_names, group.aux_arrays) for a in arrays]
        self._statistics = watching(self._statistics, items)

    # -- files --------------------------------------------------------------------------------------

    def save_checkpoint(
        self, prefix: str, epoch: int, save_optimizer_states: bool = False, remove_amp_cast: bool = True
    ) -> None:
        """Plain FP32 files that ``mx.mod.Module.load`` opens without mxmp; each appears whole or not at all."""
        with replacing(f"{prefix}-symbol.json") as path:
            self._symbol.save(path, remove_amp_cast=remove_amp_cast)
        self.save_params(f"{prefix}-{epoch:04d}.params")
        if save_optimizer_states:
            self.save_optimizer_states(f"{prefix}-{epoch:04d}.states")
        self.logger.info("Saved checkpoint %s-%04d", prefix, epoch)

    def save_params(self, fname: str) -> None:
        with replacing(fname) as path:
            super().save_params(path)

    def save_optimizer_states(self, fname: str) -> None:
        """Optimizer states, masters, scaler and counters, for ``load_optimizer_states``."""
        save(self, fname)

    def load_optimizer_states(self, fname: str) -> None:
        """Continue from ``save_optimizer_states``, on any number of devices.

        Raises
        ------
        ValueError
            The file is damaged, or of other parameters or another optimizer; nothing has changed.
        """
        load(self, fname)


class Core:
    """What the modules of all buckets share."""

    def __init__(self, step: ScaledStep) -> None:
        self.step = step
        self.decided = False
        self.low_names: set[str] = set()
        self.masters: dict[str, list[NDArray]] = {}
        self.index: dict[str, int] = {}
        self.scaled_by = 1.0


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """``name`` set to ``value`` for a call of MXNet's that takes no argument for it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
