"""``Module``: MXNet's own, which computes in low precision and takes safe steps.

The module's ``symbol``, its parameters and its checkpoints are the user's, in FP32. Executors are bound to a private
symbol with casts and, before loss heads, the loss scale.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..files import replacing
from ..kernels.fit import UNKNOWN, device_of
from ..kernels.fusion import Unfused
from ..policy import Policy
from ..precision.decide import check_policy
from ..precision.heads import SCALE_NAME
from ..precision.plan import Plan
from ..step import states
from ..step._mxnet import is_called_by_user
from ..step.gradients import Gradient
from ..step.masters import Weight, assign, share_drawn, share_initial
from ..step.statistics import RunningStatistics
from ..step.step import ScaledStep, StepView
from ..step.stores import check_kvstore, is_distributed, open_store, refuse_compression, refuse_sparse_weight
from ..step.updater import Update, Updaters
from . import _mxnet
from .checkpoint import SavesParams, write_symbol
from .core import Core

__all__ = ["Module"]


class Module(SavesParams, StepView, mx.mod.Module):
    """``mx.mod.Module`` in mixed precision: the same constructor and methods, three more keywords.

    Parameters
    ----------
    symbol, data_names, label_names, ...
        As for ``mx.mod.Module``. ``compression_params`` is refused.
    policy : str, Policy or Plan
        A recipe (``print(Policy.recipes())``), a policy string, a Policy, a Plan of this very Symbol, or the path of a
        saved Plan.
    exclude : iterable of str
        Patterns of nodes or blocks to keep in FP32, added to the policy's.
    loss_scale : {"dynamic"}, float, None or a scaler
        As for ``mxmp.Trainer``. It multiplies the ``grad_scale`` of the heads, and is divided out through the
        optimizer's ``rescale_grad``, on top of the user's.

    Attributes
    ----------
    plan : Plan or None
        The dtype that each operator computes in, and why; None before ``bind``.

    Raises
    ------
    ValueError
        The policy cannot hold, or an argument would apply gradients before they are checked.
    """

    def __init__(
        self,
        symbol: mx.sym.Symbol,
        *args: Any,
        policy: str | Policy | Plan = "float16",
        exclude: Iterable[str] = (),
        loss_scale: Any = "dynamic",
        **kwargs: Any,
    ) -> None:
        if not isinstance(symbol, mx.sym.Symbol):
            hint = ": for a Block use mxmp.convert and mxmp.Trainer" if isinstance(symbol, mx.gluon.Block) else ""
            raise TypeError(f"Module takes an mxnet Symbol, got {type(symbol).__name__}{hint}")
        self.core = Core(policy, exclude, loss_scale)
        self.plan: Plan | None = None
        self.requested_gradients: Mapping[str, str] = {}
        self._symbol: Any
        self._arg_params: Any
        self._kvstore: Any
        self._params_dirty: bool
        self._preload_opt_states: str | None
        super().__init__(symbol, *args, **kwargs)
        self._device = device_of(self._context[0])
        check_policy(self.policy, self._device)
        refuse_compression(self._compression_params)
        self._statistics = RunningStatistics()

    @classmethod
    def load(cls, prefix: str, epoch: int, load_optimizer_states: bool = False, **kwargs: Any) -> Module:
        """Load as ``mx.mod.Module.load``; takes ``policy``, ``exclude`` and ``loss_scale`` too."""
        symbol, args, auxs = mx.model.load_checkpoint(prefix, epoch)
        module = cls(symbol, **kwargs)
        module.start_from(args, auxs, f"{prefix}-{epoch:04d}.states" if load_optimizer_states else None)
        return module

    def start_from(self, arg_params: dict, aux_params: dict, states: str | None = None) -> None:
        """Start from these FP32 parameters, and the optimizer states in a file, before ``bind``."""
        self._arg_params, self._aux_params = arg_params, aux_params
        self.params_initialized = True
        self._preload_opt_states = states

    @property
    def policy(self) -> Policy:
        """Return the policy that it binds by, or that its Plan was made for."""
        return self.core.conversion.policy

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
        """Bind as ``mx.mod.Module.bind``, executors of the graph with casts."""
        self.core = self.core if shared_module is None else shared_module.core
        fresh = self._arg_params is None
        original = self._symbol
        if force_rebind or not self.binded:
            names, fixed, is_one = self._param_names, self._fixed_param_names, isinstance(grad_req, str)
            requested = {each: "null" if each in fixed else grad_req for each in names} if is_one else UNKNOWN
            self.requested_gradients = requested
            low, self.plan = self.core.low_symbol(original, self._device, names, for_training, requested)
            # oneDNN's fusion is wrong for inference where a convolution feeds an activation and a skip: 7 % off in
            # bfloat16 on a ResNet-50 v2, against 0.5 % without it.
            fuses = mx.cpu(0) in self._context and "MXNET_SUBGRAPH_BACKEND" not in os.environ
            self._symbol = Unfused(low, self._group2ctxs) if fuses else low
        try:
            super().bind(
                data_shapes, label_shapes, for_training, inputs_need_grad, force_rebind, shared_module, grad_req
            )
        finally:
            self._symbol = original
        if fresh and shared_module is None:
            for name in self.core.low_names & set(self._param_names):
                self._arg_params[name] = mx.nd.zeros(self._arg_params[name].shape)

    def install_monitor(self, mon: Any) -> None:
        """Install as ``mx.mod.Module.install_monitor`` a monitor, which lists the network's own operators.

        Nodes that mxmp inserted are left out. Values are FP32 arrays, rounded as the operators of the compute dtype
        round them, and gradients are those of the loss times the loss scale.

        Raises
        ------
        RuntimeError
            Before ``bind``.
        """
        if self.plan is None:
            raise RuntimeError("call bind() first: a monitor is installed in executors")
        for executor in self._exec_group.execs:
            mon.install(_mxnet.Monitored(executor, self._symbol, self.plan))

    def init_params(self, *args: Any, **kwargs: Any) -> None:
        super().init_params(*args, **kwargs)
        self.core.set_masters(self._arg_params, self.arrays())

    def set_params(
        self,
        arg_params: dict,
        aux_params: dict,
        allow_missing: bool = False,
        force_init: bool = True,
        allow_extra: bool = False,
    ) -> None:
        """Set parameters as ``mx.mod.Module.set_params``: FP32 values, which the masters receive unrounded."""
        super().set_params(arg_params, aux_params, allow_missing, force_init, allow_extra)
        if allow_missing:
            low = {k: v for k, v in (arg_params or {}).items() if k in self.core.low_names}
            for name, value in low.items():
                self._arg_params[name][:] = value
            self.core.set_masters(low, self.arrays())

    def _sync_params_from_devices(self) -> None:
        low = {name: self._arg_params[name].copy() for name in self.core.low_names}
        super()._sync_params_from_devices()
        self._arg_params.update({**low, **self.core.values(self.arrays())})

    @property
    def _exec_group(self) -> Any:
        """Return what holds the executors; there is no other access to their arrays, so a user may write into them."""
        if is_called_by_user():
            self.core.exposed = True
        return self._group

    @_exec_group.setter
    def _exec_group(self, group: Any) -> None:
        self._group = group

    def arrays(self) -> dict[str, list[NDArray]]:
        """Return the arrays that the executors compute with: by parameter, one per device."""
        return dict(zip(self._exec_group.param_names, self._exec_group.param_arrays))

    # -- optimizer ----------------------------------------------------------------------------------

    def init_optimizer(
        self,
        kvstore: Any = "local",
        optimizer: Any = "sgd",
        optimizer_params: Any = (("learning_rate", 0.01),),
        force_init: bool = False,
    ) -> None:
        """Initialize as ``mx.mod.Module.init_optimizer`` an optimizer, which never updates on the kvstore.

        Raises
        ------
        ValueError
            For ``dist_async``, which applies gradients before any check, and for a store that MXNet does not have.
        ImportError
            ``"horovod"`` without Horovod; tells how to install it.
        """
        _require(self, optimizer=False)
        if self.optimizer_initialized and not force_init:
            self.logger.warning("optimizer already initialized, ignoring...")
            return
        check_kvstore(kvstore)
        kvstore = open_store(kvstore)
        arrays = self.arrays()
        for name, copies in arrays.items():
            refuse_sparse_weight(name, copies[0].stype)
        if self._params_dirty:
            self._sync_params_from_devices()
        preload, self._preload_opt_states = self._preload_opt_states, None
        with _mxnet.without_optimizer(kvstore, len(self._context)) as store, self.keys_as_gradients():
            super().init_optimizer(store, optimizer, optimizer_params, force_init)
        self.core.make_masters(self._arg_params, arrays)
        _mxnet.number_weights_plainly(self._optimizer, list(arrays), len(self._context))
        self._updater = Updaters(self._optimizer, len(self._context), self.core.master)
        if self.has_other_workers:
            # MXNet's Module never sends rank 0's parameters to the other workers.
            share_initial(self._kvstore, self._weights_by_key())
            self._params_dirty = True
        if preload is not None:
            self.load_optimizer_states(preload)

    def _weights_by_key(self) -> dict[str, Weight]:
        """Return all weights, to send rank 0's: by keys of their own, as a key keeps the dtype of its first array."""
        return {f"{weight.name}:initial": weight for weight in self.core.weights(self.arrays())}

    @contextmanager
    def keys_as_gradients(self) -> Iterator[None]:
        """Let the kvstore's keys have the gradients' dtype: an FP32 key to which float16 is pushed hangs the job."""
        original = self._arg_params
        self._arg_params = {
            k: v.astype(self.policy.compute) if k in self.core.low_names else v for k, v in original.items()
        }
        try:
            yield
        finally:
            self._arg_params = original

    # -- another policy while it trains ------------------------------------------------------------

    def rebind(self, shared_module: Module | None) -> None:
        """Bind again as it is bound, by the policy of now. Arguments, running statistics and outputs stay.

        A metric may read the outputs after the step.
        """
        before = list(self._exec_group.execs)
        shapes = self.data_shapes, self.label_shapes
        self.bind(*shapes, self.for_training, self.inputs_need_grad, True, shared_module, self._grad_req)
        for old, new in zip(before, self._exec_group.execs):
            for values, arrays in ((old.arg_dict, new.arg_dict), (old.aux_dict, new.aux_dict)):
                for name in values.keys() & arrays.keys():
                    values[name].copyto(arrays[name])
            for value, array in zip(old.outputs, new.outputs):
                value.copyto(array)

    def remake_masters(self, weights: Mapping[str, Sequence[NDArray]]) -> None:
        """Make masters for the arrays of now, with FP32 values of each weight on each device."""
        arrays = self.arrays()
        self.core.make_masters(self._arg_params, arrays)
        for name, copies in arrays.items():
            for k, (value, array) in enumerate(zip(weights[name], copies)):
                if name in self.core.masters:
                    assign(value, [self.core.masters[name][k]], [array])
                else:
                    value.copyto(array)
        self._params_dirty = True

    def renew_store(self) -> None:
        """Open another kvstore, if there is one: a key keeps the dtype of its first array, the gradient's."""
        if self._kvstore is None:
            return
        self._kvstore = mx.kv.create(self._kvstore.type)
        with self.keys_as_gradients():
            for name in self._exec_group.param_names:
                self._kvstore.init(name, self._arg_params[name])

    @property
    def has_other_workers(self) -> bool:
        """Return whether gradients are summed over processes."""
        return is_distributed(self._kvstore)

    # -- one step -----------------------------------------------------------------------------------

    def backward(self, out_grads: Any = None) -> None:
        """Run backward as ``mx.mod.Module.backward``, with the loss times the loss scale. Does not synchronize."""
        _require(self, optimizer=False)
        group = self._exec_group
        self.scaled_step.note_own_backward(adds="add" in group.grad_req.values())
        scale = self.core.scaled_by = self.loss_scale
        self.set_head_scale(scale)
        if out_grads is not None:
            out_grads = [g * scale for g in ([out_grads] if isinstance(out_grads, NDArray) else out_grads)]
        self._statistics.watch(
            [Gradient(name, array) for name, arrays in zip(group.aux_names, group.aux_arrays) for array in arrays]
        )
        super().backward(out_grads)

    def set_head_scale(self, scale: float) -> None:
        """Let the next backward multiply the gradients of loss heads that ignore ``out_grads`` by ``scale``."""
        for executor in self._exec_group.execs:
            if SCALE_NAME in executor.arg_dict:
                executor.arg_dict[SCALE_NAME][:] = scale

    def update(self) -> None:
        """Reduce, check, and update, or skip. Synchronizes once.

        Raises
        ------
        FloatingPointError
            Repeated overflow at the lowest scale; names the parameters.
        """
        _require(self, optimizer=True)
        group, kvstore = self._exec_group, self._kvstore
        updates = []
        for name, weights, gradients in zip(group.param_names, group.param_arrays, group.grad_arrays):
            if gradients[0] is None:
                continue
            index = self.core.numbers[name]
            if kvstore is not None:
                kvstore.pushpull(name, gradients, priority=-index)
            updates += [Update(index, k, name, w, g) for k, (w, g) in enumerate(zip(weights, gradients))]
        self._params_dirty = True

        def apply() -> None:
            self._updater.apply(updates, 1.0 / self.core.scaled_by, reduced=kvstore is not None)
            share_drawn(kvstore, self._optimizer, self._weights_by_key)

        if updates:
            self.scaled_step.run(
                [update.gradient for update in updates],
                apply,
                self._statistics,
                exposed=self.core.exposed_pairs(self.arrays()),
            )

    def get_input_grads(self, merge_multi_context: bool = True) -> list:
        """Return the inputs' gradients as ``mx.mod.Module.get_input_grads``: true ones, as unscaled copies."""
        found = super().get_input_grads(merge_multi_context)
        factor = 1.0 / self.core.scaled_by
        return [g * factor if isinstance(g, NDArray) else [each * factor for each in g] for g in found]

    @property
    def scaled_step(self) -> ScaledStep:
        return self.core.step

    # -- files --------------------------------------------------------------------------------------

    def save_checkpoint(
        self, prefix: str, epoch: int, save_optimizer_states: bool = False, remove_amp_cast: bool = True
    ) -> None:
        """Save FP32 files that ``mx.mod.Module.load`` opens without mxmp; each appears completely or not at all."""
        with replacing(f"{prefix}-symbol.json") as path:
            write_symbol(path, self._symbol, remove_amp_cast)
        self.save_params(f"{prefix}-{epoch:04d}.params")
        if save_optimizer_states:
            self.save_optimizer_states(f"{prefix}-{epoch:04d}.states")
        self.logger.info("Saved checkpoint %s-%04d", prefix, epoch)

    def save_optimizer_states(self, fname: str) -> None:
        """Save optimizer states, masters, scaler and counters, for ``load_optimizer_states``. Synchronizes."""
        _require(self, optimizer=True)
        states.save(fname, self.scaled_step, self._updater, self.core.weights(self.arrays()))

    def load_optimizer_states(self, fname: str) -> None:
        """Continue from ``save_optimizer_states``, or from the file of MXNet's ``Module``, on any number of devices.

        States, masters, counters and the loss scale are the file's. Learning rate, schedule, weight decay and the
        other arguments of the optimizer are those of ``init_optimizer``, as in MXNet. A schedule that equals the
        file's continues from that one's state; another counts from now on, from ``begin_num_update``.

        Raises
        ------
        ValueError
            The file is damaged, or of other parameters or another optimizer; nothing has changed.
        """
        _require(self, optimizer=True)
        weights = self.core.weights(self.arrays())
        states.load(fname, self.scaled_step, self._updater, weights, self._context, settings="caller")
        self._params_dirty = True


def _require(module: mx.mod.BaseModule, *, optimizer: bool) -> None:
    """Raise ``RuntimeError`` before ``bind``, ``init_params`` and, if ``optimizer``, ``init_optimizer``."""
    done = {
        "bind": module.binded,
        "init_params": module.params_initialized,
        "init_optimizer": module.optimizer_initialized or not optimizer,
    }
    missing = [f"{name}()" for name, so in done.items() if not so]
    if missing:
        raise RuntimeError(
            f"call {' and '.join(missing)} first: bind(), init_params(), init_optimizer(), as fit() does"
        )
