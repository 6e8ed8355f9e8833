"""A ``gluon.Trainer`` whose steps are scaled, checked and, on overflow, skipped."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from typing import Any, Collection, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from ..messages.callers import warn_user
from ..messages.keywords import keywords_explained
from ..messages.text import class_of
from ..step import gradients as grads
from ..step import stores
from ..step.gradients import listed
from ..step.ledger import Event, Ledger, ScalerGroup
from ..step.masters import Weight
from ..step.scaler import SEARCH, as_positive, as_scaler
from ..step.statistics import RunningStatistics
from ..step.step import ScaledStep, StepView
from ..step.updater import Updaters, check_optimizer, exposed_pairs
from . import _mxnet, backward
from .backward import Gradients, check_head_gradient, head_gradient, running_statistics_of
from .conversion import any_conversion, next_forward_number
from .graphs import engine_lock
from .parameter import conversions_of, is_scaling, refuse_own_arrays, weight_of
from .record import Record
from .scaled_reads import stop_warning
from .scaling import living_trainers

logger = logging.getLogger("mxmp")

_DENSE = "a Parameter without stype=, such as nn.Embedding's, whose gradients may be sparse (sparse_grad=True)"
_NO_AMP = (
    "mxnet.contrib.amp is for MXNet's own Trainer, and an mxmp.Trainer scales by itself. Leave out amp.init() and "
    "amp.init_trainer(trainer); in place of amp.scale_loss(loss, trainer) call trainer.backward(loss), or use `with "
    "trainer.scale_loss(loss) as scaled:`; in place of amp.unscale(trainer) call trainer.unscale(); the scale is "
    "trainer.loss_scale"
)


def _check_params(params: Any) -> None:
    """Raise ValueError where ``params`` is a net or a trainer, is empty, or holds arrays in place of Parameters."""
    if isinstance(params, (gluon.Block, gluon.Trainer)):
        raise ValueError(
            f"params must be a list or dict of Parameters, net.collect_params(), got a {type(params).__name__}"
        )
    each = params.values() if isinstance(params, (dict, gluon.ParameterDict)) else params
    if not isinstance(params, (dict, gluon.ParameterDict, list, tuple)):
        return
    if not each:
        raise ValueError("params is empty, so there is nothing to train: give the net its layers before the trainer")
    if any(isinstance(param, NDArray) for param in each):
        raise ValueError(
            "params must be Parameters, got arrays: make what computes with them the forward of a Block, whose weights "
            "are self.params.get(name, shape=shape), and give this its collect_params()"
        )


class Trainer(StepView, gluon.Trainer):
    """Applies an optimizer with loss scaling, FP32 master weights and skipped steps on overflow.

    Use it as ``gluon.Trainer``, with ``trainer.backward(loss)`` in place of ``loss.backward()``::

        with autograd.record():
            loss = loss_fn(net(x), y)
        trainer.backward(loss)
        trainer.step(batch_size)

    With any scaler, no step applies a gradient with an inf, a NaN or a float64 value beyond FP32's range.
    Gradients are checked after they are summed over devices and workers, so all devices and workers decide alike: to
    update or to skip.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter
        What to train, usually ``net.collect_params()``.
    optimizer : str or mxnet.optimizer.Optimizer
        A name such as ``"sgd"``, or an object. Master weights do not need its ``multi_precision=True``.
    optimizer_params : dict, optional
        For an optimizer that is given by name: its arguments, such as ``{"learning_rate": 0.1}``.
    kvstore : str, KVStore or None
        What sums gradients over devices and workers: ``"device"``, ``"local"``, ``"nccl"``, ``"dist_sync"``,
        ``"horovod"``, an open store, or None for nothing.
    compression_params : None
        Must be None: gradient compression compares gradients with a threshold, which means nothing for scaled ones.
    update_on_kvstore : {None, False}
        True is refused: the kvstore would apply gradients before they are checked.
    loss_scale : {"dynamic"}, float, None or a scaler
        ``"dynamic"``: a new ``DynamicLossScaler()``, but no scaling if the parameters' net was converted to bfloat16,
        whose range is that of FP32. A number: this scale in every step. None: a scale of 1. A scaler, such as
        ``DynamicLossScaler(growth_interval=500)``: if several trainers get the same scaler object, one ``backward``, of
        any of them, serves each trainer whose parameters the loss reaches; then call ``step`` of each.

    Raises
    ------
    ValueError
        Gradients would be applied before they are checked (an asynchronous kvstore, ``update_on_kvstore=True``, sparse
        weights) or could not be scaled (gradient compression); MXNet has no such kvstore or optimizer; ``loss_scale``
        is none of the above; ``params`` are no parameters, none at all, or have one twice; or the class of one
        overrides ``list_data`` or ``list_grad``.
    TypeError
        The optimizer takes no such parameter.
    ImportError
        ``kvstore="horovod"`` without Horovod; the message says how to install it.

    Examples
    --------
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(16, activation="relu"), nn.Dense(2))
    >>> net.initialize()
    >>> net = mxmp.convert(net, "float16")
    >>> trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=128.0)
    >>> x, y = mx.nd.random.uniform(shape=(8, 4)), mx.nd.zeros(8)
    >>> with autograd.record():
    ...     loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
    >>> trainer.backward(loss)  # in place of loss.backward()
    >>> trainer.step(batch_size=8)
    >>> trainer.last_step_skipped, trainer.loss_scale
    (False, 128.0)
    """

    updates_masters = True  # LowParameter refuses every other Trainer

    @keywords_explained
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
        if isinstance(params, (str, mx.optimizer.Optimizer)):
            raise TypeError(f"params come first, then the optimizer: Trainer(net.collect_params(), {params!r})")
        stores.check_kvstore(kvstore, update_on_kvstore)
        stores.refuse_compression(compression_params)
        check_optimizer(optimizer, optimizer_params)
        _check_params(params)
        self._requested_scale = loss_scale
        self.ledger = Ledger()
        self._step = ScaledStep(loss_scale, self.ledger) if as_scaler(loss_scale) is loss_scale else None
        self._gradients: Gradients | None = None  # those that this step has read
        self._statistics = RunningStatistics()
        self._last_update = next_forward_number()
        self._warned = False
        self._warned_of_reads = False
        store = stores.open_store(kvstore, 2**30)
        searching = [each for each in list(living_trainers) if each.skips_of_search]
        super().__init__(params, optimizer, optimizer_params, kvstore=store, update_on_kvstore=False)
        self._lost_skips = self._count_lost_skips(searching)
        times = Counter(map(id, self._params))
        for param in self._params:
            stores.refuse_sparse_weight(param.name, _mxnet.storage(param), _DENSE)
            refuse_own_arrays(param)
            if times[id(param)] > 1:
                raise ValueError(f"params has {param.name!r} twice, so each step would update it twice: list it once")
        self.watch_statistics()
        living_trainers.add(self)

    def __setstate__(self, state: dict) -> None:
        """Restore a trainer from ``copy`` or ``pickle`` as if it had just stepped: copied weights have no gradients."""
        self.__dict__.update(state, _last_update=next_forward_number(), _gradients=None)
        living_trainers.add(self)

    # -- backward -----------------------------------------------------------------------------------

    def backward(
        self,
        loss: NDArray | Sequence[NDArray],
        out_grad: Any = None,
        retain_graph: bool = False,
        train_mode: bool = True,
        *,
        head_grads: Any = None,
    ) -> None:
        """Run backward from ``loss * loss_scale``.

        The gradients of several calls before one step add up where ``grad_req`` is ``"add"``; elsewhere each call
        overwrites them. The loss scale stays the same between the calls, with one exception: if a call overwrites all
        gradients of the call before, and these have an inf or NaN, then they are discarded, as by ``discard``, and the
        loss scale falls first. Several threads may call this method, such as one for each device (GluonCV's
        ``Parallel``); they take turns.

        Does not wait for the device, except: for the forward before the first update, if a net has running statistics;
        for gradients that no step has applied and that are overwritten; and for the whole backward where Python code
        computes gradients (``mx.operator.CustomOp``, ``autograd.Function``). Such code gets true gradients, without the
        loss scale, and what it returns is multiplied by the scale.

        Parameters
        ----------
        loss : NDArray or sequence of NDArray
            One recorded loss of any shape, or several, such as one per device.
        out_grad : NDArray or sequence of NDArray or None, optional
            The gradient of each loss, with its shape, dtype and device, as for ``loss.backward(out_grad)``, without the
            loss scale. None: 1 for each element.
        retain_graph : bool
            As for ``loss.backward``: True keeps what was recorded, for another backward.
        train_mode : bool
            As for ``loss.backward``: whether the backward is that of training.
        head_grads : NDArray or sequence of NDArray or None, optional
            The name that ``autograd.backward`` has for ``out_grad``: give one of the two.

        Raises
        ------
        ValueError
            A loss is float16 and the loss scale above 2**15, or a loss is float16 or bfloat16 and cannot hold the loss
            scale exactly, as it can hold powers of two: compute the loss in FP32. Or a loss head outside any converted
            net would ignore the loss scale. Or the sequence is empty. Or ``out_grad`` does not fit the losses.
        RuntimeError
            The call comes after ``unscale`` or ``clip_global_norm``, or after ``allreduce_grads`` if a parameter has
            ``grad_req="add"``, and the gradients were not set to zero since: step or discard first. Or inside
            ``scale_loss``. Or the loss was computed outside ``autograd.record()``. Or the backward would overwrite
            gradients that another mxmp.Trainer has not applied
            yet, or add to unscaled gradients of ``loss.backward()``.
        TypeError
            ``loss`` or ``out_grad`` is neither an NDArray nor a sequence of them.
        """
        if isinstance(out_grad, (bool, int)):  # ``retain_graph`` was the second argument once
            out_grad, retain_graph = None, bool(out_grad)
        if out_grad is not None and head_grads is not None:
            raise ValueError("out_grad and head_grads are two names for the same gradients: give one of them")
        given = head_grads if out_grad is None else out_grad
        losses, heads, record = self._begin_backward(loss, given)
        with backward.scaled_backward(self, record):
            autograd.backward(losses, heads, retain_graph=retain_graph, train_mode=train_mode)

    @contextmanager
    def scale_loss(self, loss: NDArray | Sequence[NDArray]) -> Iterator[Any]:
        """Return a context manager that gives ``loss * loss_scale``, for code that calls backward itself.

        A list of losses gives a list. Use it inside or outside ``autograd.record()``. Head gradients that you pass to
        the backward are those of the losses, without the loss scale::

            with trainer.scale_loss(loss) as scaled:
                autograd.backward(scaled)

        Threads take turns: while one is in the ``with`` block, the others cannot call a converted net.

        Raises
        ------
        ValueError, RuntimeError, TypeError
            As ``backward`` does, before the block. Also ``RuntimeError``, at the end of the block, if backward was
            called in it on another loss than ``scaled``, such as the unscaled one, unless the loss scale is 1; ``step``
            then refuses the gradients. ``step`` also refuses the gradients of a backward after the block, which it
            cannot distinguish from those of an unscaled loss.
        """
        losses, factors, record = self._begin_backward(loss)
        for factor in factors:
            factor.attach_grad()
        with backward.scaled_backward(self, record, factors):
            with autograd.record(train_mode=autograd.is_training()):
                scaled = [item * factor for item, factor in zip(losses, factors)]
            yield scaled if isinstance(loss, (list, tuple)) else scaled[0]

    # -- between backward and step ------------------------------------------------------------------

    def allreduce_grads(self) -> None:
        """Sum the gradients over devices and workers; ``update`` then applies them.

        Does nothing if the gradients are summed already, and no backward has run since. The gradients stay multiplied
        by the loss scale, unless ``unscale`` was called before. Does not wait for the device; but with several workers
        the first call of a run waits until all have the same initial weights.

        Raises
        ------
        RuntimeError
            At a loss scale other than 1: ``loss.backward()``, besides ``trainer.backward(loss)``, has written some of
            the gradients, which are then not scaled. At a loss scale of 1: ``loss.backward()`` has overwritten
            gradients that ``clip_global_norm`` has clipped, or has added to gradients that are summed already.
        """
        self._sum_gradients()

    def _sum_gradients(self) -> Gradients:
        """Do what ``allreduce_grads`` does, which a subclass may override: as in MXNet, ``step`` does not call it."""
        self._accept_true_gradients()
        found = self._prepare()
        self._notice_plain_backward(found)
        if not self.ledger.summed:
            if self._kvstore is not None and len(self._contexts) > 1:
                backward.zero_stale(found)
            self._allreduce_grads()
        self.ledger.note(Event.REDUCE, self.loss_scale)
        self.ledger.accumulates = "add" in [param.grad_req for param in self._params]
        return found

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, in place, to read or change the true ones before ``step``.

        If a dense gradient has an inf or NaN now, ``step`` will be skipped, whatever you write into the gradients
        before they are summed (by ``step``, ``allreduce_grads`` or ``clip_global_norm``); of a row-sparse gradient only
        the later values count. Only the gradients of this trainer's parameters are divided; for the gradient of an
        input take ``x.grad / trainer.loss_scale``, before ``step``. Does not wait for the device.

        Raises
        ------
        RuntimeError
            ``unscale`` was called already since the last step. Or, at a loss scale other than 1, no scaled backward has
            run since the last step, or ``loss.backward()`` has written some of the gradients.
        ValueError
            Gradients are float16, which cannot hold unscaled values. Nothing is changed.
        """
        if self._accept_true_gradients():
            factor = 1.0
        else:
            self.ledger.check(Event.UNSCALE, self.loss_scale, fresh=self._has_fresh)
            factor = 1.0 / self.loss_scale
        due = self._read_gradients().due
        found = [update.gradient for update in due]
        grads.unscale(found, factor)
        self.ledger.overflows = grads.Overflows(found)
        stop_warning(self._params)
        # They are true gradients now, which any optimizer may apply.
        backward.mark_fresh(update.weight for update in due)
        self.ledger.note(Event.UNSCALE, self.loss_scale)

    def input_grad(self, x: NDArray) -> NDArray:
        """Return the gradient of an input from the last ``backward``, divided by the loss scale, as a new array.

        ``x`` is an array for which ``x.attach_grad()`` was called before the forward. If the gradient has an inf or
        NaN, a warning is logged, and the loss scale falls at the next step, ``discard`` or ``backward``, so that a
        later call is right. Waits for the device, unless the loss scale is 1. Raises ``ValueError`` if ``x`` has no
        gradient.
        """
        if not isinstance(x, NDArray) or x.grad is None:
            raise ValueError("input_grad(x) needs an NDArray with a gradient: call x.attach_grad() before the forward")
        scale = self.scaled_step.ledger.scale
        with autograd.pause():
            found = x.grad / scale
        if scale != 1.0 and grads.non_finite([grads.Gradient("input", found)]):
            self.scaled_step.note_input_overflow()
        return found

    def clip_global_norm(self, max_norm: float) -> float:
        """Limit the global L2 norm of the true (unscaled) gradients to ``max_norm``; return the norm before clipping.

        Sums the gradients over devices and workers first, and waits for the device. As in
        ``gluon.utils.clip_global_norm``, the gradients are not divided by the batch size. The summed gradients do not
        change: the update multiplies them by ``max_norm / norm`` if ``norm`` is larger than ``max_norm``. If ``norm``
        is inf or NaN, nothing is clipped and ``step`` will be skipped. To leave the step out by the norm, call
        ``discard`` in place of ``step``.

        ``max_norm`` is a number, or an array with one.

        Raises
        ------
        RuntimeError
            At a loss scale other than 1: no scaled backward has run since the last step, or ``loss.backward()`` has
            written some of the gradients. At a loss scale of 1: as ``allreduce_grads`` does.
        ValueError
            ``max_norm`` is not positive.
        """
        limit = float(as_positive("max_norm", max_norm))
        self._accept_true_gradients()  # before the ledger is asked
        self.ledger.check(Event.CLIP, self.loss_scale, fresh=self._has_fresh)
        due = self._sum_gradients().due
        # Without a kvstore each device has gradients of its own; with one, all that are due are the same sum.
        summed = [*{update.index: update for update in reversed(due)}.values()][::-1]
        counted = due if self._kvstore is None else summed
        total = grads.norm([update.gradient for update in counted]) * self._gradient_factor
        if limit < total < float("inf"):
            self.ledger.clip *= limit / total
        if not np.isfinite(total):  # the step is skipped, and a discard lowers the loss scale, whatever is written now
            self.ledger.overflows = grads.Overflows([update.gradient for update in due])
        self.ledger.note(Event.CLIP, self.loss_scale)
        return total

    # -- step ---------------------------------------------------------------------------------------

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over devices and workers, check them, and update the weights, or skip the step on overflow.

        The update divides the gradients by ``loss_scale * batch_size``. Waits for the device once, again if it finds an
        overflow, and for each row-sparse gradient.

        Parameters
        ----------
        batch_size : int or float
            As for ``gluon.Trainer``: the number of samples of the step; with Horovod, of one worker's part. An array of
            one element is taken too, and waited for.
        ignore_stale_grad : bool
            A stale gradient is one that no backward has written since the last step. True: leave the parameters with a
            stale gradient as they are; if no backward has reached any, do nothing. False: raise ``UserWarning`` if
            there are any, as ``gluon.Trainer`` does.

        Raises
        ------
        RuntimeError
            At a loss scale other than 1: no scaled backward has run since the last step, or ``loss.backward()`` has
            written some of the gradients, which the update would divide by a scale that they do not have. At a loss
            scale of 1: as ``allreduce_grads`` does.
        FloatingPointError
            The third overflow in a row at a loss scale that cannot fall (lowest, fixed or None); names the parameters.
        ValueError
            ``batch_size`` is not positive.
        """
        self._begin_update("step", batch_size, ignore_stale_grad)
        self._sum_gradients()
        self._check_and_update(ignore_stale_grad)

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Check the gradients that ``allreduce_grads`` has summed; update the weights, or skip the step on overflow.

        This is the second half of ``step``: call ``allreduce_grads`` after the last backward, and then this method.
        Arguments, errors and waiting are those of ``step``, with one exception. Gradients that are not summed, because
        ``allreduce_grads`` was not called or a backward came later, are applied as they are, without an error. But at a
        loss scale other than 1, those of ``loss.backward()`` raise ``RuntimeError``, unless ``unscale`` was called.
        """
        self._begin_update("update", batch_size, ignore_stale_grad)
        self._prepare()
        self._check_and_update(ignore_stale_grad)

    def discard(self) -> None:
        """Leave this step out: drop the gradients of this trainer's parameters, instead of ``step``.

        For a step that your own code rejects, such as by the norm that ``clip_global_norm`` returned. All gradients
        that a backward has written since the last step become zero, and no later step applies them; the next
        ``backward`` and ``save_states`` may follow, whatever was called before. Weights, counters and schedules stay as
        they are, and so does the loss scale, with one exception: if a gradient has an inf or NaN, the scale falls, as
        after a skipped step, so that a later backward can be right. Running statistics that are not finite go back to
        their last finite values.

        Of trainers with one scaler, each steps or discards, and the scaler is adjusted when all have. With several
        workers, all must discard. Setting all gradients to zero, by ``zero_grad`` of the parameters, is understood as a
        discard where ``backward`` or ``save_states`` would otherwise refuse. Does nothing if there are no gradients.
        Waits for the device.
        """
        overflows = self.ledger.overflows or self.ledger.put_back
        self.ledger.overflows = self.ledger.put_back = None
        if overflows is not None:
            overflows.put_back()
        if self.ledger.pending and self.has_other_workers and not self.ledger.summed:
            self._prepare()
            self._allreduce_grads()  # all workers find the same overflows
        found = self._found()
        backward.release(self, found.due)
        if found.due or self.ledger.pending:
            self.scaled_step.discard([update.gradient for update in found.due], self._statistics)
        self._drop(found)

    def discard_zeros(self) -> None:
        """Call ``discard`` if a user has set all gradients to zero since the backward, or replaced them, by another
        ``grad_req``. Waits for the device."""
        due = self._found().due
        if not due or grads.are_zero([update.gradient for update in due]):
            self.discard()

    def has_overflow(self) -> bool:
        """Return whether a gradient that no step has applied has an inf or NaN. Waits for the device."""
        found = [update.gradient for update in self._found().due]
        return self.ledger.inputs_overflowed or (bool(found) and bool(grads.non_finite(found)))

    def _found(self) -> Gradients:
        """Return the gradients as they are now; ``index`` is into ``_ready``."""
        return backward.read_gradients(self._ready, self.ledger)

    @property
    def _ready(self) -> list[Parameter]:
        return list(filter(_mxnet.is_initialized, self._params))

    def _drop(self, found: Gradients) -> None:
        for update in found.due:
            update.grad[:] = 0  # the next backward may add to it
        backward.use_up(self._ready, found)
        self.ledger.clear()
        self._gradients = None

    def save_states(self, fname: str) -> None:
        """Save the optimizer's states, master weights, scaler and step counters to the file ``fname``.

        Waits for the device. An existing file is replaced only when the new one is complete. Raises ``RuntimeError``
        between ``trainer.backward`` and its step or ``discard``, because the gradients would be missing from the file,
        unless all are zero. Raises
        ``TypeError`` if an optimizer of the user's own keeps a state that is none of these: an NDArray, a number, a
        string, None, or a dict, list or tuple of them.
        """
        if self.ledger.pending:
            self.discard_zeros()
        if self.ledger.pending:
            raise RuntimeError(
                "save_states between backward and step would lose the gradients: step first, or trainer.discard()"
            )
        from ..step import states

        states.save(fname, self.scaled_step, self._updaters, self._all_weights())

    def check_states(self, fname: str) -> None:
        """Raise the errors of ``load_states`` for a file that this trainer cannot continue from; change nothing."""
        self._read_states(fname, only_check=True)

    def load_states(self, fname: str) -> None:
        """Continue from a file of ``save_states``, or of MXNet's own Trainer or Module. Runs no code from the file.

        May be called before or after the first step, with another number of devices, with parameters in FP32 or
        float16. If the file has master weights, the parameters get their values, whether they are stored in float16 or
        FP32. Gradients that were not applied yet are dropped. The parameters may have other numbers in their names than
        in the file, because the same code built the net again in one process. In a file of MXNet's, a state belongs to
        the parameter at the same position, unless the file has names. A file that holds states only, such as the bytes
        of ``trainer._updaters[0].get_states()``, leaves counts and learning rate as they are. A warning is logged if
        the weights, now or at the next step, are those of another step than the file's. Waits for the device.

        Raises
        ------
        ValueError
            The file is damaged, or belongs to other parameters or another optimizer. Nothing has changed.
        OSError
            The file cannot be read.
        """
        self._read_states(fname)
        self._statistics = RunningStatistics()  # those of before belong to another run
        self.watch_statistics()
        self._drop(self._found())  # they have another scale
        self.scaled_step.group.forget_backward(self.scaled_step)

    def _read_states(self, fname: str, *, only_check: bool = False) -> None:
        from ..step import states

        args = self.scaled_step, self._updaters, self._all_weights, self._contexts
        states.load(fname, *args, only_check=only_check)

    # -- attributes that mxnet.contrib.amp reads and writes ------------------------------------------

    @property
    def _amp_loss_scaler(self) -> Any:
        raise AttributeError(_NO_AMP)  # for ``amp.scale_loss``; ``hasattr`` stays False

    @_amp_loss_scaler.setter
    def _amp_loss_scaler(self, value: Any) -> None:
        raise TypeError(_NO_AMP)  # for ``amp.init_trainer``

    @property
    def _scale(self) -> float:
        """Return the ``rescale_grad`` that the user gave to the optimizer, 1 by default, without the batch size."""
        # MXNet's Trainer sets this property. Each step divides it by the batch size for the optimizer's
        # ``rescale_grad``, which is multiplied by ``_gradient_factor`` while the optimizer runs.
        return self._rescale_grad

    @_scale.setter
    def _scale(self, value: float) -> None:
        # Between a backward and its step only ``amp.unscale`` would set it, which does not unscale these gradients.
        if self.ledger.pending:
            raise TypeError(_NO_AMP)
        self._rescale_grad = value

    # -- inside -------------------------------------------------------------------------------------

    def _begin_backward(self, loss: Any, given: Any = None) -> tuple[list[NDArray], list[NDArray], Record]:
        """Return the losses as a list, a head gradient with the loss scale for each, and their Record.
        ``given`` are the head gradients of the user's, or None for 1."""
        losses = listed(loss)
        if not losses:
            raise ValueError("loss must be an NDArray or a list of them, such as one per device, got an empty list")
        record, gradients = Record(losses), [None] * len(losses) if given is None else listed(given)
        if len(gradients) != len(losses):
            raise ValueError(f"got {len(gradients)} head gradients for {len(losses)} losses: give one for each")
        with autograd.pause():
            for item, gradient in zip(losses, gradients):  # before anything changes
                check_head_gradient(item, self.loss_scale, gradient)
            backward.discard_unused(self, record)
            heads = [head_gradient(item, self.loss_scale, gradient) for item, gradient in zip(losses, gradients)]
        self._warn_of_other_trainer()
        return losses, heads, record

    def _warn_of_other_trainer(self) -> None:
        """Warn, once per trainer, if MXNet's own Trainer was made later over one of the parameters."""
        # The other Trainer's ``step``, called by mistake, would apply gradients with the loss scale in them.
        if self._warned or self.loss_scale == 1.0:
            return
        for param in self._params:
            last = _mxnet.trainer_of(param)
            if last is not None and not is_scaling(last):
                self._warned = True
                warn_user(
                    f"a {class_of(last)} was made over {param.name!r} after this "
                    "mxmp.Trainer: its step does not unscale the gradients of this trainer's backward, so call "
                    "step of this one",
                )
                return

    def warn_of_scaled_gradients(self, param: Parameter) -> None:
        """Warn, once per trainer, that user code reads the gradient of ``param``, if the loss scale is in it."""
        if not self._warned_of_reads and backward.is_written(param, self.ledger):
            self._warned_of_reads = True
            warn_user(
                f"the gradient of {param.name!r} is read between a scaled backward and the step, and is "
                f"multiplied by the loss scale, {self.loss_scale:g} now: norms and limits of clipping are off by it. "
                "Call trainer.unscale() first, or trainer.clip_global_norm(max_norm) in place of "
                "gluon.utils.clip_global_norm",
            )

    def _notice_plain_backward(self, found: Gradients) -> None:
        """Record which gradients ``loss.backward()``, which does not notify the trainer, wrote at a loss scale of 1.
        If earlier ones were summed already, they become "not summed". Raises the errors of ``allreduce_grads``."""
        if self.loss_scale != 1.0 or self.ledger.unscaled:
            return
        if self.ledger.summed and found.fresh:
            self.ledger.check(Event.BACKWARD, self.loss_scale)
            self.ledger.note(Event.BACKWARD, self.loss_scale)
        backward.note_fresh(found, self.ledger)

    def _read_gradients(self) -> Gradients:
        """Return the gradients; ``RuntimeError`` if, besides a scaled backward, a plain one has written some."""
        found = backward.read_gradients(self._params, self.ledger)
        if self.loss_scale != 1.0 and self.ledger.pending and not self.ledger.unscaled:
            backward.refuse_unscaled_gradients(found, self.loss_scale)
        return found

    def _log_needless_scale(self) -> None:
        """Warn before the first step if losses are scaled by default, no net is converted, and all is FP32."""
        if self.scaled_step.steps or self.loss_scale == 1.0 or self._requested_scale != "dynamic" or any_conversion():
            return
        if all(np.dtype(_mxnet.dtype_of(param)) == np.float32 for param in self._params):
            logger.warning(
                "losses are scaled by %g, and no net is converted, so all is FP32, which needs no scaling: call "
                "mxmp.convert(net), or use loss_scale=None",
                self.loss_scale,
            )

    @property
    def may_scale(self) -> bool:
        """Return whether the loss scale is other than 1, or may be.
        With "dynamic", before the first backward: True unless all nets of the parameters are converted to bfloat16."""
        if self._step is None and self._requested_scale == "dynamic":
            return not self._only_bfloat16
        return self.loss_scale != 1.0

    @property
    def scaler_group(self) -> ScalerGroup | None:
        """Return the group of all trainers with the same scaler object; None before this trainer has a scaler.
        The scaler adjusts the loss scale when each trainer whose gradients a backward has written has stepped."""
        return self._step.group if self._step is not None else None

    @property
    def has_other_workers(self) -> bool:
        """Return whether the kvstore sums gradients over several processes; also known before the kvstore is opened."""
        requested = self._kvstore_params["kvstore"]
        return "dist" in requested if isinstance(requested, str) else stores.is_distributed(requested)

    def renew_store(self) -> None:
        """Replace the kvstore, if it is open, by a new one of the same type, without any arrays. For ``mxmp.guard``.
        A kvstore of the user's own class, or Horovod's, is not replaced, but gets the weights anew. Raises
        ``RuntimeError`` for one of MXNet's distributed stores, which cannot be replaced."""
        if self._kvstore is not None:
            # It accepts the gradient of a parameter only in the dtype of the first; the guard changes dtypes.
            if isinstance(self._kvstore, mx.kv.KVStore):
                self._kvstore_params["kvstore"] = mx.kv.create(self._kvstore.type)
            self._reset_kvstore()

    @property
    def scaled_step(self) -> ScaledStep:
        """Return the ScaledStep of this trainer, which checks gradients and keeps the scaler and the counters.

        If the user gave no scaler object as ``loss_scale``, the first access makes ScaledStep and scaler, and not the
        constructor. The first access is usually the first backward. By then the net is converted, so it is known
        whether the net computes in bfloat16, which needs no loss scale.
        """
        if self._step is None:
            scaler = as_scaler(self._requested_scale, only_bfloat16=self._only_bfloat16)
            self._step = ScaledStep(scaler, self.ledger)
        return self._step

    @property
    def skips_of_search(self) -> int:
        """Return how many steps were skipped and none applied, by this trainer and by those whose search for a loss
        scale it began anew; 0 from the first step on that is applied."""
        if self._step is None:
            return self._lost_skips
        return self._lost_skips + self._step.skipped_steps if self._step.steps == self._step.skipped_steps else 0

    def _count_lost_skips(self, others: Sequence[Trainer]) -> int:
        """Return ``skips_of_search`` of those of ``others`` that have updated these parameters, if this trainer
        searches anew; warn if one scaler for all would have ended the search, after ``SEARCH`` skips."""
        scaler, own = as_scaler(self._requested_scale), set(map(id, self._params))
        lost = 0
        for other in others:
            known = other.scaled_step.scaler
            is_lost = known is not scaler and known.loss_scale < scaler.loss_scale
            if is_lost and own & set(map(id, _mxnet.parameters_of(other))):
                lost = max(lost, other.skips_of_search)
        if lost >= SEARCH:
            warn_user(
                f"Trainers of these parameters have skipped all of their {lost} steps, each to find the loss scale, "
                f"and this one begins at {scaler.loss_scale:g} again, so nothing may ever train: make one scaler, "
                "scaler = mxmp.DynamicLossScaler(), and give it to each, Trainer(..., loss_scale=scaler)"
            )
        return lost

    @property
    def _only_bfloat16(self) -> bool:
        return {conversion.policy.compute for conversion in conversions_of(self._params)} == {"bfloat16"}

    @property
    def _gradient_factor(self) -> float:
        """Return the factor of the update besides ``rescale_grad``: of clipping, and to divide by the loss scale."""
        return self.ledger.clip / (1.0 if self.ledger.unscaled else self.loss_scale)

    def _begin_update(self, called: str, batch_size: Any, ignore_stale_grad: bool) -> None:
        """Check that the user may update now, and set the optimizer's ``rescale_grad`` for ``batch_size``.
        ``called`` is the method that the user called, for the message."""
        number = as_positive("batch_size", batch_size)
        self._accept_true_gradients()
        written = self.ledger.pending or self.ledger.scale_of_other is not None or self._has_fresh
        if written or not ignore_stale_grad:
            # At a scale of 1 all stale gradients are refused later, unless they are to be ignored.
            fresh = not ignore_stale_grad or self._has_fresh
            self.ledger.check(Event.UPDATE, self.loss_scale, called=called, fresh=fresh)
        if not self.ledger.pending and self._has_fresh:  # a plain backward, at a loss scale of 1
            self.watch_statistics()
        self._log_needless_scale()
        self._check_and_rescale_grad(self._scale / number)

    @property
    def _has_fresh(self) -> bool:
        """Return whether MXNet has marked a gradient as written: by no scaled backward, or at a loss scale of 1."""
        return bool(_mxnet.fresh_weights(self._params))

    def _accept_true_gradients(self) -> bool:
        """Take gradients that another trainer's backward has written at a loss scale of 1 for unscaled ones, and return
        whether there are any. Not those of a net in float16, which needs a loss scale."""
        if self.ledger.pending or self.ledger.scale_of_other != 1.0 or not self._has_fresh:
            return False
        if any(conversion.policy.compute == "float16" for conversion in conversions_of(self._params)):
            return False
        backward.note_fresh(backward.read_gradients(self._ready, self.ledger), self.ledger)
        self.ledger.note(Event.BACKWARD, self.loss_scale)
        self.ledger.note(Event.UNSCALE, self.loss_scale)
        return True

    def _prepare(self) -> Gradients:
        """Do what must come before gradients are summed over devices and workers; open the kvstore at first use."""
        found = self._gradients = self._read_gradients()
        # The check, and other workers, must see what was not finite when the user unscaled the gradients.
        overflows, self.ledger.overflows = self.ledger.overflows, None
        if overflows is not None:
            overflows.put_back()
            self.ledger.put_back = overflows
        if not self._kv_initialized:
            self._init_kvstore()
        if self._params_to_init:
            self._init_params()
        return found

    def _init_optimizer(self, optimizer: Any, optimizer_params: dict) -> None:
        super()._init_optimizer(optimizer, optimizer_params)
        self._updaters = Updaters(self._optimizer, len(self._contexts))

    def _init_kvstore(self) -> None:
        super()._init_kvstore()
        stores.check_kvstore(self._kvstore)
        self._distributed = stores.is_distributed(self._kvstore)

    def _init_params(self) -> None:
        """Send parameters, then FP32 masters, to the kvstore; of several workers, all get those of worker 0."""
        waiting = {p.name for p in self._params_to_init}
        super()._init_params()
        if self._distributed:
            sent = waiting - {p.name for p in self._params_to_init}
            weights = self._weights([p for p in self._params if p.name in sent])
            arrays = [array for weight in weights.values() for array in weight.arrays]  # MXNet has sent these
            stores.share_initial(self._kvstore, {key: each for key, each in weights.items() if each.masters}, arrays)

    def _all_weights(self) -> list[Weight]:
        """Return all parameters, as states are loaded for them."""
        return [weight_of(param) for param in self._params]

    def _weights(self, params: Collection[Parameter]) -> dict[int, Weight]:
        """Return the ``Weight`` of each of ``params`` by the kvstore's key."""
        weights = {index: weight_of(param) for index, param in enumerate(self._params) if param in params}
        # MXNet uses a parameter's index for its arrays; masters get the index plus the number of parameters.
        return {index + (len(self._params) if each.masters else 0): each for index, each in weights.items()}

    def _check_and_update(self, ignore_stale_grad: bool) -> None:
        """Call ``_update``; raise ``RuntimeError`` if a subclass has replaced it and applied scaled gradients."""
        factor = self._gradient_factor
        self._update(ignore_stale_grad)
        if self.ledger.pending and factor != 1.0:
            raise RuntimeError(
                f"{type(self).__name__} overrides _update and does not call super()._update(): the gradients that it "
                "applied were neither checked nor divided by the loss scale. Call it, or use loss_scale=None"
            )

    def _update(self, ignore_stale_grad: bool = False) -> None:
        """Check all gradients that a backward has written since the last step, and apply them or skip the step."""
        found = self._gradients or backward.read_gradients(self._params, self.ledger)
        self._gradients = None
        if not ignore_stale_grad:
            backward.refuse_stale(found, self.ledger)
        updates = found.due
        factor = self._gradient_factor

        def trained() -> dict[int, Weight]:
            return self._weights([param for param in self._params if param.grad_req != "null"])

        def apply() -> None:
            # SGLD adds random noise to its updates, and each worker draws its own.
            with engine_lock():
                self._updaters.apply(updates, factor, reduced=self._kvstore is not None)
            stores.share_drawn(self._kvstore, self._optimizer, trained)

        backward.release(self, updates)
        try:
            if updates:
                self.scaled_step.run(
                    [update.gradient for update in updates],
                    apply,
                    self._statistics,
                    exposed=exposed_pairs(updates),
                    unscaled=self.ledger.unscaled,
                )
            else:
                self.scaled_step.discard([])
        finally:
            backward.use_up(self._params, found)
            self.ledger.clear()
            self._last_update = next_forward_number()

    def watch_statistics(self) -> RunningStatistics:
        """Copy the running statistics that the next backward may overwrite, so that the step can undo an inf or NaN.
        Waits for the forward, unless all are watched already, and an earlier step found them and its gradients finite:
        then nothing is copied."""
        return self._statistics.watch(running_statistics_of(self._params, self._last_update))
