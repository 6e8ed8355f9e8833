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

from ..files import replacing
from ..policy import Policy, as_policy
from ..precision.decide import check_policy
from ..precision.devices import device_of
from ..precision.heads import SCALE_NAME
from ..step import states
from ..step.gradients import Gradient
from ..step.masters import Weight, share_drawn, share_initial
from ..step.refusals import check_kvstore, refuse_compression, refuse_sparse_weight
from ..step.scaler import as_scaler
from ..step.statistics import RunningStatistics
from ..step.step import ScaledStep, StepView
from ..step.stores import is_distributed, open_store
from ..step.updater import Update, Updaters
from . import _mxnet
from .core import Core, grad_requests

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
        self._statistics = RunningStatistics()

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
            self._symbol = self._core.low_symbol(
                original,
                self.policy,
                self._device,
                self._param_names,
                for_training,
                grad_requests(grad_req, self._param_names, self._fixed_param_names),
            )
        # oneDNN's fusion is wrong for inference where a convolution feeds an activation and a skip: 7 % off in
        # bfloat16 on a ResNet-50 v2, against 0.5 % without it.
        backend = "MXNET_SUBGRAPH_BACKEND"
        unfused = nullcontext() if backend in os.environ else _mxnet.environment(backend, "NONE")
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

    def init_params(self, *args: Any, **kwargs: Any) -> None:
        super().init_params(*args, **kwargs)
        self._core.set_masters(self._arg_params, self._arrays())

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
            self._core.set_masters(given, self._arrays())

    def _sync_params_from_devices(self) -> None:
        low = {name: self._arg_params[name].copy() for name in self._core.low_names}
        super()._sync_params_from_devices()
        for weight in self._core.weights(self._arrays()):
            if weight.masters:
                low[weight.name] = mx.nd.add_n(*(m.as_in_context(mx.cpu()) for m in weight.masters)) / len(
                    weight.masters
                )
        self._arg_params.update(low)

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
            For ``dist_async``, which applies gradients before any check, and for a store that MXNet does not have.
        ImportError
            ``"horovod"`` without Horovod; says how to install it.
        """
        if self.optimizer_initialized and not force_init:
            self.logger.warning("optimizer already initialized, ignoring...")
            return
        check_kvstore(kvstore)
        kvstore = open_store(kvstore)
        arrays = self._arrays()
        for name, copies in arrays.items():
            refuse_sparse_weight(name, copies[0].stype)
        if self._params_dirty:
            self._sync_params_from_devices()
        preload, self._preload_opt_states = self._preload_opt_states, None
        # Only so does MXNet leave the update to us, dist_sync included.
        with _mxnet.environment("MXNET_UPDATE_ON_KVSTORE", "0"), self._keys_as_gradients():
            super().init_optimizer(kvstore, optimizer, optimizer_params, force_init)
        core = self._core
        core.make_masters(self._arg_params, arrays)
        _mxnet.number_weights_plainly(self._optimizer, core.names, len(self._context))
        self._updater = Updaters(self._optimizer, len(self._context), core.master)
        if is_distributed(self._kvstore):
            # MXNet's Module never sends rank 0's parameters to the other workers.
            share_initial(self._kvstore, self._weights_by_key())
            self._params_dirty = True
        if preload is not None:
            self.load_optimizer_states(preload)

    def _weights_by_key(self) -> dict[str, Weight]:
        """For rank 0's values, by keys of their own: a key has the dtype of what it first held."""
        return {f"{weight.name}:initial": weight for weight in self._core.weights(self._arrays())}

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
        group = self._exec_group
        self._statistics.watch(
            [Gradient(name, array) for name, arrays in zip(group.aux_names, group.aux_arrays) for array in arrays]
        )
        super().backward(out_grads)

    def update(self) -> None:
        """Reduce, check, and update, or skip. Synchronizes once.

        Raises
        ------
        FloatingPointError
            Repeated overflow at the lowest scale; names the parameters.
        """
        group, kvstore = self._exec_group, self._kvstore
        updates = []
        for name, weights, gradients in zip(group.param_names, group.param_arrays, group.grad_arrays):
            if gradients[0] is None:
                continue
            index = self._core.names.index(name)
            if kvstore is not None:
                kvstore.pushpull(name, gradients, priority=-index)
            updates += [Update(index, k, name, w, g) for k, (w, g) in enumerate(zip(weights, gradients))]
        self._params_dirty = True

        def apply() -> None:
            self._updater.apply(updates, 1.0 / self._core.scaled_by, reduced=kvstore is not None)
            share_drawn(kvstore, self._optimizer, self._weights_by_key)

        if updates:
            self._state.run([update.gradient for update in updates], apply, self._statistics)

    def get_input_grads(self, merge_multi_context: bool = True) -> list:
        """As ``mx.mod.Module.get_input_grads``: the true gradients, unscaled copies."""
        found = super().get_input_grads(merge_multi_context)
        factor = 1.0 / self._core.scaled_by
        return [g * factor if isinstance(g, NDArray) else [each * factor for each in g] for g in found]

    @property
    def _state(self) -> ScaledStep:
        return self._core.step

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
        states.save(fname, self._state, self._updater, self._core.weights(self._arrays()))

    def load_optimizer_states(self, fname: str) -> None:
        """Continue from ``save_optimizer_states``, on any number of devices.

        Raises
        ------
        ValueError
            The file is damaged, or of other parameters or another optimizer; nothing has changed.
        """
        states.load(fname, self._state, self._updater, self._core.weights(self._arrays()), self._context)
        self._params_dirty = True
