"""The Gluon frontend as plain MXNet has it, and as mxmp has it with a record of each step, for ``verify``."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, Mapping, Sequence

from mxnet import autograd, gluon
from mxnet.gluon import Block
from mxnet.gluon.contrib import estimator
from mxnet.ndarray import NDArray

from ....gluon import _mxnet
from ....gluon.convert import convert, restore
from ....gluon.estimator import BatchProcessor
from ....gluon.parameter import full_arrays
from ....gluon.trainer import Trainer
from ....precision.plan import read_policy
from ....step.gradients import Gradient, listed
from ....step.scaler import as_positive
from ..stand_ins import PlainStep, StepRecorder, in_full_precision
from ._mxnet import after_initial_values, around_updates, export_if_possible, never_hybridize


class _Recorded:
    """Records the losses of a backward, plain or scaled, and what weights the trainer begins with."""

    recorder: StepRecorder

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self._params:  # type: ignore[attr-defined]
            if _mxnet.is_initialized(param):
                self.recorder.initial_value(param, False)  # a script may have written into them since

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        self.recorder.note_losses(self, listed(loss))
        super().backward(loss, *args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def scale_loss(self, loss: Any) -> Iterator[Any]:
        self.recorder.note_losses(self, listed(loss))
        with super().scale_loss(loss) as scaled:  # type: ignore[misc]
            yield scaled


class _PlainTrainer(PlainStep, gluon.Trainer):
    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        kvstore: Any = "device",
        compression_params: Any = None,
        update_on_kvstore: Any = None,
        *,
        loss_scale: Any = None,
    ) -> None:
        super().__init__(params, optimizer, optimizer_params, kvstore, compression_params, False)
        self._summed = False

    def backward(
        self,
        loss: Any,
        out_grad: Any = None,
        retain_graph: bool = False,
        train_mode: bool = True,
        *,
        head_grads: Any = None,
    ) -> None:
        if isinstance(out_grad, (bool, int)):
            out_grad, retain_graph = None, bool(out_grad)
        given = head_grads if out_grad is None else out_grad
        heads = None if given is None else listed(given)
        self._summed = False
        autograd.backward(listed(loss), heads, retain_graph=retain_graph, train_mode=train_mode)

    @contextmanager
    def scale_loss(self, loss: Any) -> Iterator[Any]:
        self._summed = False
        yield loss

    def unscale(self) -> None:
        pass

    def input_grad(self, x: NDArray) -> NDArray:
        return x.grad.copy()

    def clip_global_norm(self, max_norm: float) -> float:
        limit = float(as_positive("max_norm", max_norm))
        self.allreduce_grads()
        arrays = [self._gradients(param) for param in self._trained if self._is_due(param)]
        counted = [array for each in arrays for array in (each if self._kvstore is None else each[:1])]
        with autograd.pause():
            total = float(sum(float((g.as_nd_ndarray().astype("float64") ** 2).sum().asscalar()) for g in counted))
            total **= 0.5
            if limit < total < float("inf"):
                for array in (array for each in arrays for array in each):
                    array *= limit / total
        return total

    def discard(self) -> None:
        with self.recorder.discarding(self, self._due, lambda: _values(self._params)):
            self._drop()

    def _drop(self) -> None:
        for param in self._trained:
            for array, gradient in zip(_mxnet.arrays(param), self._gradients(param)):
                if _mxnet.is_fresh(array):
                    gradient[:] = 0
                    _mxnet.set_fresh(array, fresh=False)
        self._summed = False

    def check_states(self, fname: str) -> None:
        pass

    @property
    def _trained(self) -> list[gluon.Parameter]:
        return [p for p in self._params if p.grad_req != "null" and _mxnet.is_initialized(p)]

    @property
    def _due(self) -> list[Gradient]:
        return [Gradient(p.name, self._gradients(p)[0]) for p in self._trained if self._is_due(p)]

    @staticmethod
    def _gradients(param: gluon.Parameter) -> Sequence[NDArray]:
        return param.list_grad()

    @staticmethod
    def _is_due(param: gluon.Parameter) -> bool:
        return any(map(_mxnet.is_fresh, _mxnet.arrays(param)))

    def _allreduce_grads(self) -> None:
        if not self._summed:
            super()._allreduce_grads()
        self._summed = True

    def _update(self, ignore_stale_grad: bool = False) -> None:
        with self.plain_step(self._due, self._optimizer.rescale_grad, lambda: _values(self._params)) as applies:
            if applies:
                super()._update(ignore_stale_grad)
            else:
                self._drop()
        self._summed = False


class _RecordedTrainer(_Recorded, Trainer):
    """Records what each step of an mxmp.Trainer applies, as an observer of its own steps."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._applies():
            super().step(*args, **kwargs)

    def update(self, *args: Any, **kwargs: Any) -> None:
        if self._applies():
            super().update(*args, **kwargs)

    def discard(self) -> None:
        due = [update.gradient for update in self._found().due]
        with self.recorder.discarding(self, due, lambda: _values(self._params)):
            super().discard()

    def _applies(self) -> bool:
        if self not in self.scaled_step.observers:
            self.scaled_step.observers.append(self)
        applies = not self.recorder.leaves_out(self)
        if not applies:
            self.recorder.before_step(self, (), 1.0, _values(self._params), skipped=True)
            super().discard()
            self.after_step()
        return applies

    def before_update(self, gradients: Sequence[Gradient]) -> None:
        factor = self._gradient_factor * self._optimizer.rescale_grad
        skipped = bool(self.scaled_step.overflow_params)
        self.recorder.before_step(self, gradients, factor, _values(self._params), skipped=skipped)

    def after_step(self) -> None:
        self.recorder.after_step(self, lambda: _values(self._params))


def _values(params: Sequence[gluon.Parameter]) -> Mapping[str, NDArray]:
    return {param.name: full_arrays(param)[0] for param in params if _mxnet.is_initialized(param)}


class _PlainBatchProcessor(estimator.BatchProcessor):
    def fit_batch(self, estimator: Any, train_batch: Any, batch_axis: int = 0) -> tuple:
        found = super().fit_batch(estimator, train_batch, batch_axis)
        if isinstance(estimator.trainer, _PlainTrainer):
            estimator.trainer.recorder.note_losses(estimator.trainer, found[3])
        return found


def stand_ins(mode: str, recorder: StepRecorder, *, imperative: bool) -> dict[Any, Any]:
    """Return what stands in for each public name of this frontend in a run of ``mode``, by the real object."""
    if imperative:
        never_hybridize()
    after_initial_values(recorder.initial_value)

    def recorded(trainer: gluon.Trainer, factor: float, update: Callable[[], None]) -> None:
        if isinstance(trainer, _Recorded):
            return update()
        params = _mxnet.parameters_of(trainer)
        found = [
            Gradient(p.name, p.list_grad()[0]) for p in params if p.grad_req != "null" and _mxnet.is_initialized(p)
        ]
        recorder.before_step(trainer, found, factor, _values(params), own=False)
        update()
        recorder.after_step(trainer, lambda: _values(params))

    around_updates(recorded)

    def plain_convert(net: Block, policy: Any = "float16", *, exclude: Any = ()) -> Block:
        recorder.note_policy(read_policy(policy, () if callable(exclude) else exclude)[0])
        return net

    def full_convert(net: Block, policy: Any = "float16", *, exclude: Any = ()) -> Block:
        full = in_full_precision(read_policy(policy, () if callable(exclude) else exclude)[0])
        return convert(net, full, exclude=exclude if callable(exclude) else ())

    name = {"recorder": recorder, "__module__": Trainer.__module__}
    if mode == "plain":
        export_if_possible()
        return {
            convert: plain_convert,
            restore: lambda net: net,
            Trainer: type("Trainer", (_Recorded, _PlainTrainer), name),
            BatchProcessor: _PlainBatchProcessor,
        }
    found: dict[Any, Any] = {Trainer: type("Trainer", (_RecordedTrainer,), name)}
    return {**found, convert: full_convert} if mode == "graph" else found
