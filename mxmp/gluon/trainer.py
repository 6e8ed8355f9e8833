"""A ``gluon.Trainer`` whose steps are scaled, checked and, on overflow, skipped; and what an Estimator needs for it."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from functools import partial
from typing import Any, Collection, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import Parameter
from mxnet.gluon.contrib import estimator
from mxnet.ndarray import NDArray

from ..callbacks import hold_interrupts
from ..step import gradients as grads
from ..step import states
from ..step.masters import Weight, share_drawn, share_initial
from ..step.phase import Event, Phase, Progress
from ..step.scaler import ScalerGroup, as_scaler, check_positive
from ..step.statistics import RunningStatistics
from ..step.step import ScaledStep, StepView
from ..step.stores import check_kvstore, is_distributed, open_store, refuse_compression, refuse_sparse_weight
from ..step.updater import Updaters
from . import _mxnet, backward
from .conversion import any_conversion, next_forward_number, running_statistics_of
from .graphs import engine_lock
from .parameter import conversions_of, exposed_pairs, is_scaling, master_at, weight_of
from .scaling import Record, explain_unrecorded, head_gradient, heads_scaled_by

__all__ = ["BatchProcessor", "Trainer"]

logger = logging.getLogger("mxmp")


_NO_AMP = (
    "mxnet.contrib.amp is for MXNet's own Trainer, and an mxmp.Trainer scales by itself. Leave out amp.init() and "
    "amp.init_trainer(trainer); in place of amp.scale_loss(loss, trainer) call trainer.backward(loss), or use `with "
    "trainer.scale_loss(loss) as scaled:`; in place of amp.unscale(trainer) call trainer.unscale(); the scale is "
    "trainer.loss_scale"
)


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
    params, optimizer, optimizer_params, kvstore
        As for ``gluon.Trainer``; also ``kvstore="horovod"``. Masters need no ``multi_precision``; it does no harm.
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
    ImportError
        ``kvstore="horovod"`` without Horovod; says how to install it.
    """

    updates_masters = True  # LowParameter refuses every other Trainer

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
        self._requested_scale = loss_scale
        self._step = ScaledStep(loss_scale) if as_scaler(loss_scale) is loss_scale else None
        self.progress = Progress()
        self._statistics = RunningStatistics()
        self._last_update = next_forward_number()
        self._warned = False
        store = open_store(kvstore)
        super().__init__(params, optimizer, optimizer_params, kvstore=store, update_on_kvstore=False)
        for param in self._params:
            refuse_sparse_weight(param.name, _mxnet.storage(param))
        self.watch_statistics()
        backward.add_trainer(self)

    def __setstate__(self, state: dict) -> None:
        """Restore a copy: it is the trainer of another net, whose parameters have no gradients yet."""
        self.__dict__.update(state, _last_update=next_forward_number(), progress=Progress())
        backward.add_trainer(self)

    # -- backward -----------------------------------------------------------------------------------

    def backward(self, loss: NDArray | Sequence[NDArray], retain_graph: bool = False) -> None:
        """Run backward from ``loss * loss_scale``; one loss or a list, such as one per device.

        Several calls before a step accumulate where ``grad_req`` is ``"add"``; the scale does not
        change in between. Does not wait for the device.

        Raises
        ------
        ValueError
            A float16 loss at a scale that float16 cannot hold: compute the loss in FP32. Or a loss head
            outside any converted net that ignores the scale.
        RuntimeError
            After ``unscale``, ``clip_global_norm`` or ``allreduce_grads``: step first. Inside ``scale_loss``.
            It reaches parameters whose gradients another Trainer has yet to apply, or would add to
            gradients of ``loss.backward()``, which are not scaled. Outside ``autograd.record()``.
        """
        losses, heads, record = self._begin_backward(loss)
        scaled = backward.scaled_backward(self, record)
        with heads_scaled_by(self.loss_scale, record), scaled, engine_lock(), hold_interrupts(), explain_unrecorded():
            autograd.backward(losses, heads, retain_graph=retain_graph)

    @contextmanager
    def scale_loss(self, loss: NDArray | Sequence[NDArray]) -> Iterator[Any]:
        """Give the loss times the scale, for loops that call backward themselves.

        Inside or outside ``autograd.record()``::

            with trainer.scale_loss(loss) as scaled:
                autograd.backward(scaled)

        Raises
        ------
        ValueError, RuntimeError
            As ``backward`` does. And ``RuntimeError`` where the block calls backward of another loss than ``scaled``,
            such as the unscaled one: ``step`` will refuse its gradients.
        """
        losses, factors, record = self._begin_backward(loss)
        for factor in factors:
            factor.attach_grad()
        with heads_scaled_by(self.loss_scale, record), backward.scaled_backward(self, record, factors):
            with autograd.record(train_mode=autograd.is_training()):
                scaled = [item * factor for item, factor in zip(losses, factors)]
            yield scaled if isinstance(loss, (list, tuple)) else scaled[0]

    # -- between backward and step ------------------------------------------------------------------

    def allreduce_grads(self) -> None:
        """Sum the gradients over devices and workers, once a step; ``update`` then applies them."""
        self._prepare()
        if not self.progress.reduced:
            if self._kvstore is not None and len(self._contexts) > 1:
                backward.zero_stale(self._params)
            self._allreduce_grads()
        self.progress.note(Event.REDUCE, self.loss_scale)
        self.progress.accumulates = any(p.grad_req == "add" for p in self._params)

    def unscale(self) -> None:
        """Divide the parameters' gradients by the scale in place, to look at or change true ones before ``step``.

        What is not finite now will be skipped by ``step``, whatever the gradients are changed to. Other gradients stay
        scaled: for an input's, ``x.grad / trainer.loss_scale`` before ``step``.

        Raises
        ------
        RuntimeError
            Before a scaled backward, or a second time.
        ValueError
            Gradients are float16, which cannot hold unscaled values; nothing is changed.
        """
        self.progress.check(Event.UNSCALE, self.loss_scale)
        self._refuse_unscaled_gradients()
        updates = backward.due_updates(self._params, ignore_stale=True)
        found = [update.gradient for update in updates]
        grads.unscale(found, 1.0 / self.loss_scale)
        self.progress.overflows = grads.Overflows(found)
        # They are true gradients now, which any optimizer may apply.
        backward.mark_fresh(update.weight for update in updates)
        self.progress.note(Event.UNSCALE, self.loss_scale)

    def clip_global_norm(self, max_norm: float) -> float:
        """Limit the global L2 norm of the true gradients to ``max_norm``; return the norm before.

        Reduces over devices first. The norm is of unscaled gradients, summed over the batch as in
        ``gluon.utils.clip_global_norm``; the update multiplies by the factor of clipping, as by that of the scale.
        A non-finite norm clips nothing, and ``step`` will skip. Waits for the device.
        """
        check_positive("max_norm", max_norm)
        self.progress.check(Event.CLIP, self.loss_scale)
        self.allreduce_grads()
        updates = backward.due_updates(self._params, ignore_stale=True)
        total = grads.norm([update.gradient for update in updates if update.device == 0]) * self._gradient_factor
        if max_norm < total < float("inf"):
            self.progress.clip *= float(max_norm) / total
        self.progress.note(Event.CLIP, self.loss_scale)
        return total

    # -- step ---------------------------------------------------------------------------------------

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Reduce, check, and update with ``1 / (loss_scale * batch_size)``, or skip. Waits for the device once.

        Raises
        ------
        RuntimeError
            Gradients were not scaled, at a scale other than 1: those of ``loss.backward()``, before or after
            ``backward``.
        FloatingPointError
            Repeated overflow at the lowest scale; names the parameters.
        """
        self._begin_update("step", batch_size)
        self.allreduce_grads()
        self._update(ignore_stale_grad)

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Apply what ``allreduce_grads`` has reduced: the second half of ``step``."""
        self._begin_update("update", batch_size)
        self._prepare()
        self._update(ignore_stale_grad)

    def save_states(self, fname: str) -> None:
        """Save optimizer states, masters, scaler and counters; the old file survives until it is written.

        Between a backward and its step the gradients are part of the state and are not saved, so
        that raises ``RuntimeError``.
        """
        if self.progress.phase is not Phase.READY:
            raise RuntimeError("save_states between backward and step would lose the gradients: step first")
        states.save(fname, self.scaled_step, self._updaters, [weight_of(param) for param in self._params])

    def load_states(self, fname: str) -> None:
        """Continue from ``save_states``, or from the file of MXNet's own Trainer. Runs no code from the file.

        Before or after the first step, with another number of devices, in FP32 or with float16
        parameters: masters in the file set the weights, whatever those are stored in. Gradients of an
        unfinished step are forgotten.

        Raises
        ------
        ValueError
            The file is damaged, or of other parameters or another optimizer; nothing has changed.
        """
        states.load(
            fname, self.scaled_step, self._updaters, [weight_of(param) for param in self._params], self._contexts
        )
        self.progress = Progress()  # earlier gradients belong to another scale
        self.scaled_step.group.forget_backward(self.scaled_step)
        ready = list(filter(_mxnet.is_initialized, self._params))
        backward.make_stale(ready, backward.due_updates(ready, ignore_stale=True))

    # -- attributes that mxnet.contrib.amp reads and writes ------------------------------------------

    @property
    def _amp_loss_scaler(self) -> Any:
        raise AttributeError(_NO_AMP)  # for ``amp.scale_loss``; ``hasattr`` stays False

    @_amp_loss_scaler.setter
    def _amp_loss_scaler(self, value: Any) -> None:
        raise TypeError(_NO_AMP)  # for ``amp.init_trainer``

    @property
    def _scale(self) -> float:
        """The optimizer's own ``rescale_grad``, as in MXNet's Trainer."""
        return self._rescale_grad

    @_scale.setter
    def _scale(self, value: float) -> None:
        """Raise ``TypeError`` for ``amp.unscale`` between a backward and its step, which would not unscale."""
        if self.progress.phase is not Phase.READY:
            raise TypeError(_NO_AMP)
        self._rescale_grad = value

    # -- inside -------------------------------------------------------------------------------------

    def _begin_backward(self, loss: Any) -> tuple[list[NDArray], list[NDArray], Record]:
        """Return the losses as a list, what their backward starts from, and what was recorded of them."""
        losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
        if not losses:
            raise ValueError("loss must be an NDArray or a list of them, such as one per device, got an empty list")
        with autograd.pause():
            heads = [head_gradient(item, self.loss_scale) for item in losses]
        self._warn_of_other_trainer()
        return losses, heads, Record(losses)

    def _warn_of_other_trainer(self) -> None:
        """Warn, once, where a Trainer that does not scale was made after this one, and may step by mistake."""
        if self._warned or self.loss_scale == 1.0:
            return
        for param in self._params:
            last = _mxnet.trainer_of(param)
            if last is not None and not is_scaling(last):
                self._warned = True
                warnings.warn(
                    f"a {type(last).__module__}.{type(last).__name__} was made over {param.name!r} after this "
                    "mxmp.Trainer: its step does not unscale the gradients of this trainer's backward, so call "
                    "step of this one",
                    stacklevel=4,
                )
                return

    def _refuse_unscaled_gradients(self) -> None:
        """Raise ``RuntimeError`` for gradients that the update would divide by a scale that they never had."""
        if self.loss_scale == 1.0 or self.progress.phase is Phase.READY or self.progress.unscaled:
            return
        if any(map(_mxnet.is_fresh, self.progress.factors)):  # the backward came after the block of scale_loss
            backward.note_scaled_gradients(self._params)
        backward.refuse_unscaled_gradients(self._params, self.loss_scale)

    def _log_needless_scale(self) -> None:
        """Log, before the first step, that losses are scaled though no net is converted and nobody gave a scale."""
        if self.scaled_step.steps or self.loss_scale == 1.0 or self._requested_scale != "dynamic" or any_conversion():
            return
        if all(np.dtype(param.dtype) == np.float32 for param in self._params):
            logger.warning(
                "losses are scaled by %g, and no net is converted, so all is FP32, which needs no scaling: call "
                "mxmp.convert(net), or use loss_scale=None",
                self.loss_scale,
            )

    @property
    def scaler_group(self) -> ScalerGroup | None:
        """The group of all steps that share this trainer's scaler; None before it has one."""
        return self._step.group if self._step is not None else None

    @property
    def has_other_workers(self) -> bool:
        """Return whether gradients are summed over processes. The store need not be open yet."""
        requested = self._kvstore_params["kvstore"]
        return "dist" in requested if isinstance(requested, str) else is_distributed(requested)

    def renew_store(self) -> None:
        """Open another kvstore, for gradients of other dtypes: a key keeps the dtype of its first array."""
        if self._kvstore is not None:
            self._kvstore_params["kvstore"] = mx.kv.create(self._kvstore.type)
            self._reset_kvstore()

    @property
    def scaled_step(self) -> ScaledStep:
        if self._step is None:
            computes = {c.policy.compute for c in conversions_of(self._params)}
            self._step = ScaledStep(as_scaler(self._requested_scale, low_range=computes != {"bfloat16"}))
        return self._step

    @property
    def _gradient_factor(self) -> float:
        """The factor from the gradients as they are to the true, clipped ones."""
        return self.progress.clip / (1.0 if self.progress.unscaled else self.loss_scale)

    def _begin_update(self, called: str, batch_size: float) -> None:
        self.progress.check(Event.UPDATE, self.loss_scale, called=called)
        check_positive("batch_size", batch_size)
        self._log_needless_scale()
        self._optimizer.rescale_grad = self._scale / batch_size

    def _prepare(self) -> None:
        """Check the gradients' scale, put back what was not finite, and open the store."""
        self._refuse_unscaled_gradients()
        # The check, and other workers, must see what was not finite when the user unscaled the gradients.
        overflows, self.progress.overflows = self.progress.overflows, None
        if overflows is not None:
            overflows.put_back()
        if not self._kv_initialized:
            self._init_kvstore()
        if self._params_to_init:
            self._init_params()

    def _init_optimizer(self, optimizer: Any, optimizer_params: dict) -> None:
        super()._init_optimizer(optimizer, optimizer_params)
        self._updaters = Updaters(self._optimizer, len(self._contexts), partial(master_at, self._params))

    def _init_kvstore(self) -> None:
        super()._init_kvstore()
        check_kvstore(self._kvstore)
        self._distributed = is_distributed(self._kvstore)

    def _init_params(self) -> None:
        """Send the parameters to the store, and wait until this worker holds rank 0's values, masters included."""
        waiting = {p.name for p in self._params_to_init}
        super()._init_params()
        if self._distributed:
            sent = waiting - {p.name for p in self._params_to_init}
            weights = self._weights([p for p in self._params if p.name in sent])
            arrays = [array for weight in weights.values() for array in weight.arrays]  # MXNet has sent these
            share_initial(self._kvstore, {key: each for key, each in weights.items() if each.masters}, arrays)

    def _weights(self, params: Collection[Parameter]) -> dict[int, Weight]:
        """Return weights by their keys on the store: i for the array of parameter i, count + i for its FP32 master."""
        weights = {index: weight_of(param) for index, param in enumerate(self._params) if param in params}
        return {index + (len(self._params) if each.masters else 0): each for index, each in weights.items()}

    def _update(self, ignore_stale_grad: bool = False) -> None:
        updates = backward.due_updates(self._params, ignore_stale=ignore_stale_grad)
        factor = self._gradient_factor

        def trained() -> dict[int, Weight]:
            return self._weights([param for param in self._params if param.grad_req != "null"])

        def apply() -> None:
            with engine_lock():
                self._updaters.apply(updates, factor, reduced=self._kvstore is not None)
            share_drawn(self._kvstore, self._optimizer, trained)

        try:
            if updates:
                statistics = self._statistics if self.progress.phase is not Phase.READY else self.watch_statistics()
                self.scaled_step.run(
                    [update.gradient for update in updates],
                    apply,
                    statistics,
                    exposed=exposed_pairs(self._params[index] for index in {update.index for update in updates}),
                    unscaled=self.progress.unscaled,
                )
        finally:
            backward.make_stale(self._params, updates)
            self.progress = Progress()
            self._last_update = next_forward_number()

    def watch_statistics(self) -> RunningStatistics:
        return self._statistics.watch(running_statistics_of(self._params, self._last_update))


class BatchProcessor(estimator.BatchProcessor):
    """Runs backward, scaled, for ``Estimator(..., trainer=mxmp.Trainer(...), batch_processor=mxmp.BatchProcessor())``.

    Everything else of an Estimator stays as it is: handlers, metrics, and the update, which its
    ``GradientUpdateHandler`` makes with ``trainer.step``.
    """

    def fit_batch(self, estimator: Any, train_batch: Any, batch_axis: int = 0) -> tuple:
        """Return data, labels, predictions and losses, a list each with one item per device, as MXNet's does.

        Raises ``TypeError`` where the Estimator's trainer cannot scale.
        """
        if not isinstance(estimator.trainer, Trainer):
            raise TypeError(
                f"mxmp.BatchProcessor scales the loss through an mxmp.Trainer, and the Estimator has a "
                f"{type(estimator.trainer).__module__}.{type(estimator.trainer).__name__}: pass "
                'Estimator(..., trainer=mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}))'
            )
        data, label = self._get_data_and_label(train_batch, estimator.context, batch_axis)
        with autograd.record():
            pred = [estimator.net(x) for x in data]
            loss = [estimator.loss(y_hat, y) for y_hat, y in zip(pred, label)]
        estimator.trainer.backward(loss)
        return data, label, pred, loss
