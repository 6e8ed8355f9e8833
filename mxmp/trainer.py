"""A ``gluon.Trainer`` whose steps are scaled, checked and, on overflow, skipped."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

from . import fresh, states
from . import gradients as grads
from .gluon import Conversion, conversion_of
from .gradients import Gradient
from .heads import check_loss, head_gradient, refuse_unscaled_heads
from .kvstores import check_kvstore, refuse_compression, refuse_sparse_weight
from .layouts import for_weight
from .masters import LowParameter, Updater, master_of, share_initial
from .running import RunningStatistics, watching
from .scaler import as_scaler
from .step import ScaledStep, StepView, rescaled

__all__ = ["Trainer"]


class Trainer(StepView, gluon.Trainer):
    """Applies an optimizer with loss scaling, FP32 masters and skipped steps on overflow.

    Use it as ``gluon.Trainer``, with ``trainer.backward(loss)`` in place of ``loss.backward()``::

        with autograd.record():
            loss = loss_fn(net(x), y)
        trainer.backward(loss)
        trainer.step(batch_size)

    No step applies a non-finite gradient, whatever the scaler. The gradients are checked after they
    are reduced, on every device, so all devices and workers take the same decision.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter
    optimizer, optimizer_params, kvstore
        As for ``gluon.Trainer``. Masters need no ``multi_precision``; it does no harm.
    compression_params : None
        Refused: a threshold on scaled gradients means nothing.
    update_on_kvstore : {None, False}
        True would apply gradients before they are checked, and is refused.
    loss_scale : {"dynamic"}, float, None or a scaler
        ``"dynamic"``: a ``DynamicLossScaler()``, and no scaling where the parameters' net was
        converted to bfloat16, whose range is FP32's. A number: static. None: scale 1.

    Raises
    ------
    ValueError
        For a combination that could not keep the promise above; says which and why.
    """

    # LowParameter lets only such a trainer near its float16 values.
    updates_masters = True

    def __init__(
        self,
        params: Any,
        optimizer: str | mx.optimizer.Optimizer,
        optimizer_params: dict | None = None,
        kvstore: str | mx.kv.KVStore | None = "device",
        compression_params: dict | None = None,
        update_on_kvstore: bool | None = None,
        *,
        loss_scale: Any = "dynamic",
    ) -> None:
        check_kvstore(kvstore, update_on_kvstore)
        refuse_compression(compression_params)
        self._asked_scale = loss_scale
        as_scaler(loss_scale)
        self._step: ScaledStep | None = None
        self._phase = _Phase()
        self._heads_checked = False
        self._statistics: RunningStatistics | None = None
        super().__init__(params, optimizer, optimizer_params, kvstore=kvstore, update_on_kvstore=False)
        for param in self._params:
            refuse_sparse_weight(param.name, param._stype)
        self._running()

    # -- backward -----------------------------------------------------------------------------------

    def backward(self, loss: NDArray | Sequence[NDArray], retain_graph: bool = False) -> None:
        """Backward of ``loss * loss_scale``; one loss or a list, such as one per device.

        Several calls before a step accumulate where ``grad_req`` is ``"add"``; the scale does not
        change in between. Does not synchronize.

        Raises
        ------
        ValueError
            A float16 loss at a scale that float16 cannot hold: compute the loss in FP32. Or a loss head
            outside any converted net that ignores the scale.
        RuntimeError
            After ``unscale``, ``clip_global_norm`` or ``allreduce_grads``: step first.
        """
        losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
        with autograd.pause():
            heads = [head_gradient(item, self.loss_scale) for item in losses]
        self._begin_backward(losses)
        autograd.backward(losses, heads, retain_graph=retain_graph)

    @contextmanager
    def scale_loss(self, loss: NDArray | Sequence[NDArray]) -> Iterator[Any]:
        """The loss times the scale, for loops that call backward themselves.

        Inside or outside ``autograd.record()``::

            with trainer.scale_loss(loss) as scaled:
                autograd.backward(scaled)
        """
        single = not isinstance(loss, (list, tuple))
        losses: list[NDArray] = [loss] if single else list(loss)
        for item in losses:
            check_loss(item, self.loss_scale)
        self._begin_backward(losses)
        with autograd.record(train_mode=autograd.is_training()):
            scaled = [item * self.loss_scale for item in losses]
        yield scaled[0] if single else scaled

    # -- between backward and step ------------------------------------------------------------------

    def allreduce_grads(self) -> None:
        """Sum the gradients over devices and workers; ``update`` then applies them."""
        self._prepare()
        self._reduce_once()

    def unscale(self) -> None:
        """Divide the gradients by the scale in place, to look at or change true ones before ``step``.

        Raises
        ------
        RuntimeError
            Before a scaled backward, or a second time.
        ValueError
            Gradients are float16, which cannot hold unscaled values; nothing is changed.
        """
        self._require_backward("unscale")
        if self._phase.unscaled:
            raise RuntimeError("unscale() was already called since the last step: the gradients are true ones")
        found = [item.gradient for item in fresh.live(self._params, ignore_stale=True)]
        grads.unscale(found, 1.0 / self.loss_scale)
        self._phase.unscaled = True

    def clip_global_norm(self, max_norm: float) -> float:
        """Limit the global L2 norm of the true gradients to ``max_norm``; returns the norm before.

        Reduces over devices first. The norm is of unscaled gradients, summed over the batch as
        ``gluon.utils.clip_global_norm`` sees them; what clipping multiplies is folded into the
        update, as the scale is. A non-finite norm clips nothing, and ``step`` will skip. Synchronizes.
        """
        if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm > 0:
            raise ValueError(f"max_norm must be a positive number, got {max_norm!r}")
        self._require_backward("clip_global_norm")
        self._prepare()
        self._reduce_once()
        first = [i.gradient for i in fresh.live(self._params, ignore_stale=True) if i.device == 0]
        total = grads.norm(first) * self._phase.clip
        if not self._phase.unscaled:
            total /= self.loss_scale
        if max_norm < total < float("inf"):
            self._phase.clip *= max_norm / total
        self._phase.clipped = True
        return total

    # -- step ---------------------------------------------------------------------------------------

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Reduce, check, and update with ``1 / (loss_scale * batch_size)``, or skip. Synchronizes once.

        Raises
        ------
        RuntimeError
            The gradients were never scaled (a plain ``loss.backward()``), at a scale other than 1.
        FloatingPointError
            Repeated overflow at the lowest scale; names the parameters.
        """
        self._require_backward("step")
        self._set_rescale(batch_size)
        self._prepare()
        self._reduce_once()
        self._update(ignore_stale_grad)

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """The second half of ``step``, after ``allreduce_grads``."""
        self._require_backward("update")
        self._set_rescale(batch_size)
        self._prepare()
        self._update(ignore_stale_grad)

    def save_states(self, fname: str) -> None:
        """Save optimizer states, masters, scaler and counters; the old file survives until it is written.

        Between a backward and its step the gradients are part of the state and are not saved, so
        that raises ``RuntimeError``.
        """
        if self._phase.backward:
            raise RuntimeError("save_states between backward and step would lose the gradients: step first")
        low = {i: p for i, p in enumerate(self._params) if isinstance(p, LowParameter) and p._data is not None}
        states.write(
            fname,
            states.collect(
                self._state.state_dict(),
                self._optimizer,
                self._updaters[0].states,
                {i: param.masters()[0] for i, param in low.items()},
                [param.shape for param in self._params],
            ),
        )

    def load_states(self, fname: str) -> None:
        """Continue from ``save_states``, or from the file of a plain ``gluon.Trainer``. Runs no code from it.

        Before or after the first step, with another number of devices, in FP32 or with float16
        parameters: masters in the file set the weights, whatever those are stored in. Gradients of an
        unfinished step are forgotten.

        Raises
        ------
        ValueError
            The file is damaged, or of other parameters or another optimizer; nothing has changed.
        """
        found = states.read(fname)
        shapes = [p.shape for p in self._params]
        devices = [ctx.device_id for ctx in self._contexts]
        commit = states.apply_states(found, self._optimizer, shapes, devices, self._contexts[0])
        if found.step is not None:
            self._state.load_state_dict(found.step)
        commit()
        for index, master in found.masters.items():
            if self._params[index]._data is not None or self._params[index]._deferred_init:
                self._params[index].set_data(mx.nd.array(master))
        fitting = {index: self._fitting(index, found) for index in found.states}
        for updater, ctx in zip(self._updaters, self._contexts):
            updater.states = {index: states.to_device(state, ctx) for index, state in fitting.items()}
            updater.states_synced = dict.fromkeys(updater.states, True)
        self._phase = _Phase()  # gradients of before belong to another scale
        fresh.forget(self._params)

    def _fitting(self, index: int, found: states.OptimizerStates) -> Any:
        """A state for the array that our updater will hand to the optimizer."""
        param = self._params[index]
        if isinstance(param, LowParameter) or param._data is None:
            return found.states[index]
        weight = param._data[0]
        master = found.masters.get(index)
        if master is None and weight.dtype == np.float16:
            master = weight.asnumpy().astype(np.float32)
        return for_weight(self._optimizer, found.states[index], master, weight.dtype)

    # -- inside -------------------------------------------------------------------------------------

    @property
    def _state(self) -> ScaledStep:
        if self._step is None:
            computes = {c.policy.compute for c in self._conversions()}
            self._step = ScaledStep(as_scaler(self._asked_scale, low_range=computes != {"bfloat16"}))
        return self._step

    def _conversions(self) -> list[Conversion]:
        found = (conversion_of(param) for param in self._params)
        return list(dict.fromkeys(c for c in found if c is not None))

    def _begin_backward(self, losses: Sequence[NDArray]) -> None:
        if not self._heads_checked and self.loss_scale != 1.0:
            refuse_unscaled_heads(losses, self.loss_scale)
            self._heads_checked = True
        phase = self._phase
        if phase.unscaled or phase.clipped:
            raise RuntimeError("backward after unscale() or clip_global_norm(): step first, then go on")
        if phase.reduced and any(p.grad_req == "add" for p in self._params):
            raise RuntimeError("backward after allreduce_grads() would add to reduced gradients: update first")
        phase.reduced = False
        phase.backward = True
        self._running()
        for conversion in self._conversions():
            conversion.head_scale.set(self.loss_scale)

    def _require_backward(self, what: str) -> None:
        if not self._phase.backward and self.loss_scale != 1.0:
            raise RuntimeError(
                f"{what}() before a scaled backward: call trainer.backward(loss), or scale_loss(loss), instead of "
                "loss.backward() (an Estimator takes batch_processor=mxmp.BatchProcessor()); unscaled gradients "
                f"would be divided by the loss scale {self.loss_scale:g}"
            )

    def _set_rescale(self, batch_size: float) -> None:
        if isinstance(batch_size, bool) or not batch_size > 0:
            raise ValueError(f"batch_size must be positive, got {batch_size!r}")
        self._optimizer.rescale_grad = self._scale / batch_size

    def _prepare(self) -> None:
        if not self._kv_initialized:
            self._init_kvstore()
        if self._params_to_init:
            self._init_params()

    def _reduce_once(self) -> None:
        if not self._phase.reduced:
            if self._kvstore is not None and len(self._contexts) > 1:
                fresh.clear_stale(self._params)
            self._allreduce_grads()
            self._phase.reduced = True

    def _init_optimizer(self, optimizer: Any, optimizer_params: dict) -> None:
        super()._init_optimizer(optimizer, optimizer_params)
        self._make_updaters()

    def _make_updaters(self) -> None:
        def masters(k: int) -> Callable[[int], NDArray | None]:
            return lambda index: master_of(self._params[index], k)

        self._updaters = [Updater(self._optimizer, masters(k)) for k in range(len(self._contexts))]

    def _init_kvstore(self) -> None:
        super()._init_kvstore()
        check_kvstore(self._kvstore)

    def _init_params(self) -> None:
        ready = [p for p in self._params_to_init if not p._deferred_init]
        super()._init_params()
        if self._distributed:
            share_initial(
                self._kvstore,
                {
                    len(self._params) + self._param2idx[p.name]: (p.masters(), p._data)
                    for p in ready
                    if isinstance(p, LowParameter)
                },
                [array for p in ready for array in p._data],
            )

    def _update(self, ignore_stale_grad: bool = False) -> None:
        live = fresh.live(self._params, ignore_stale=ignore_stale_grad)
        factor = self._phase.clip / (1.0 if self._phase.unscaled else self.loss_scale)

        def apply() -> None:
            with rescaled(self._optimizer, factor):
                for k, updater in enumerate(self._updaters):
                    mine = [item for item in live if item.device == k]
                    if mine:
                        updater([m.index for m in mine], [m.grad for m in mine], [m.data for m in mine])

        try:
            if live:
                self._state.run([item.gradient for item in live], apply, self._running())
        finally:
            for item in live:
                item.data._fresh_grad = False
            self._phase = _Phase()

    def _running(self) -> RunningStatistics | None:
        """BatchNorm's statistics: FP32 parameters that are never differentiable, ours or the net's."""
        found = {p.name: p for p in self._params if not p._differentiable}
        for conversion in self._conversions():
            found.update(conversion.statistics)
        items = [Gradient(n, array) for n, p in found.items() if p._data is not None for array in p._data]
        self._statistics = watching(self._statistics, items)
        return self._statistics


class _Phase:
    """Where between two steps we are."""

    def __init__(self) -> None:
        self.backward = False
        self.reduced = False
        self.unscaled = False
        self.clipped = False
        self.clip = 1.0
