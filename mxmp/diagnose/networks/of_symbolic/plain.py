"""The Symbolic frontend as plain MXNet has it, and as mxmp has it with a record of each step, for ``verify``."""

from __future__ import annotations

from inspect import signature
from typing import Any, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ....precision.plan import read_policy
from ....step.gradients import Gradient
from ....symbolic import _mxnet
from ....symbolic.bucketing import BucketingModule
from ....symbolic.cast import cast_symbol
from ....symbolic.module import Module
from ..stand_ins import Inert, PlainStep, StepRecorder, in_full_precision
from ._mxnet import bound_unfused, default_bucket, executing, optimizer_of, store_of, unfused_for


class _Settled:
    """A module whose parameters begin with the values that the recorder gives."""

    recorder: StepRecorder
    _setting = False
    _has_outputs = False  # before the first forward, executors hold memory that nothing has written

    def forward(self, *args: Any, **kwargs: Any) -> None:
        super().forward(*args, **kwargs)  # type: ignore[misc]
        self._has_outputs = True

    def _note_outputs(self, owner: Any) -> None:
        if self._has_outputs:
            self.recorder.note_outputs(owner, self.get_outputs())  # type: ignore[attr-defined]

    def init_params(self, *args: Any, **kwargs: Any) -> None:
        fresh = not self.params_initialized or kwargs.get("force_init")  # type: ignore[attr-defined]
        super().init_params(*args, **kwargs)  # type: ignore[misc]
        if fresh and not self._setting:
            self._settle(drawn=True)

    def set_params(self, *args: Any, **kwargs: Any) -> None:
        setting, self._setting = self._setting, True  # it calls ``init_params``
        try:
            super().set_params(*args, **kwargs)  # type: ignore[misc]
            if not setting:
                self._settle(drawn=False)
        finally:
            self._setting = setting

    def _settle(self, drawn: bool) -> None:
        # ``fit`` sets the parameters to themselves after each epoch.
        if self.recorder.has_begun or not self.binded:  # type: ignore[attr-defined]
            return
        args, auxs = self.get_params()  # type: ignore[attr-defined]
        new = {name: self.recorder.settled(name, value, drawn, self) for name, value in args.items()}
        if any(new[name] is not args[name] for name in args):
            setting, self._setting = self._setting, True
            try:
                self.set_params(new, auxs)
            finally:
                self._setting = setting


class _PlainModule(PlainStep, _Settled):
    """What a plain Module and a plain BucketingModule share."""

    core = plan = Inert()
    running: Sequence[Any] = ()

    def __init__(
        self, *args: Any, policy: Any = "float16", exclude: Any = (), loss_scale: Any = None, **kwargs: Any
    ) -> None:
        self.policy = read_policy(policy, exclude)[0]
        self.recorder.note_policy(self.policy)
        super().__init__(*args, **kwargs)

    def update(self) -> None:
        due = _due(self)  # with a kvstore, the sum over devices, which ``update`` makes inside
        rescale = optimizer_of(executing(self)).rescale_grad
        self._note_outputs(self.owner)
        with self.plain_step(due, rescale, lambda: _values(self)) as applies:
            if applies:
                super().update()  # type: ignore[misc]

    def discard(self) -> None:
        with self.recorder.discarding(self.owner, _due(self), lambda: _values(self)):
            for arrays in _mxnet.group(executing(self)).grad_arrays:
                for array in arrays:
                    if array is not None:
                        array[:] = 0


def _due(module: Any) -> list[Gradient]:
    group, adds = _mxnet.group(executing(module)), store_of(executing(module)) is not None
    named = {name: arrays for name, arrays in zip(group.param_names, group.grad_arrays) if arrays[0] is not None}
    return [Gradient(name, _sum(arrays) if adds else arrays[0]) for name, arrays in named.items()]


def _sum(arrays: Sequence[NDArray]) -> NDArray:
    return sum((array.as_in_context(arrays[0].ctx) for array in arrays[1:]), arrays[0])


class _PlainSingle(_PlainModule, mx.mod.Module):
    load: Any = classmethod(Module.load.__func__)  # type: ignore[attr-defined]
    start_from = Module.start_from

    def bind(self, *args: Any, **kwargs: Any) -> None:
        given = signature(mx.mod.Module.bind).bind(self, *args, **kwargs).arguments
        shared = given.get("shared_module")
        if isinstance(shared, _PlainSingle) and (given.get("force_rebind") or not self.binded):
            self.shares_with = shared
        with bound_unfused(self):
            super().bind(*args, **kwargs)


class _PlainBucketing(_PlainModule, mx.mod.BucketingModule):
    load: Any = classmethod(BucketingModule.load.__func__)  # type: ignore[attr-defined]

    def _call_sym_gen(self, *args: Any, **kwargs: Any) -> Any:
        symbol, *names = super()._call_sym_gen(*args, **kwargs)
        return unfused_for(self, symbol), *names

    def start_from(self, arg_params: dict, aux_params: dict, states: str | None = None) -> None:
        Module.start_from(default_bucket(self), arg_params, aux_params, states)


class _InFull:
    """With ``in_full``, a module whose operators compute in FP32."""

    in_full = False

    def __init__(self, *args: Any, policy: Any = "float16", exclude: Any = (), **kwargs: Any) -> None:
        if self.in_full:
            policy, exclude = in_full_precision(read_policy(policy, exclude)[0]), ()
        super().__init__(*args, policy=policy, exclude=exclude, **kwargs)  # type: ignore[call-arg]


class _RecordedModule(_InFull, _Settled, Module):
    """Records what each update of an mxmp.Module applies, as an observer of it; all buckets are one."""

    def update(self) -> None:
        observers = self.scaled_step.observers
        observers[:] = [each for each in observers if not isinstance(each, _RecordedModule)] + [self]
        self._note_outputs(self.core)
        if self.recorder.leaves_out(self.core):
            self.recorder.before_step(self.core, (), 1.0, _values(self), skipped=True)
            super().discard()
            self.after_step()
        else:
            super().update()

    def discard(self) -> None:
        with self.recorder.discarding(self.core, _due(self), lambda: _values(self)):
            super().discard()

    def before_update(self, gradients: Sequence[Gradient]) -> None:
        factor = self._optimizer.rescale_grad / self.loss_scale
        skipped = bool(self.scaled_step.overflow_params)
        self.recorder.before_step(self.core, gradients, factor, _values(self), skipped=skipped)

    def after_step(self) -> None:
        self.recorder.after_step(self.core, lambda: _values(self))


def _values(module: Any) -> Mapping[str, NDArray]:
    group = _mxnet.group(executing(module))
    masters = getattr(module.core, "masters", {}) if isinstance(module, Module) else {}
    found = {name: masters.get(name, arrays)[0] for name, arrays in zip(group.param_names, group.param_arrays)}
    return {**found, **{name: arrays[0] for name, arrays in zip(group.aux_names, group.aux_arrays)}}


def stand_ins(mode: str, recorder: StepRecorder) -> dict[Any, Any]:
    """Return what stands in for each public name of this frontend in a run of ``mode``, by the real object."""
    name = {"recorder": recorder, "__module__": Module.__module__}

    def plain_cast(sym: mx.sym.Symbol, policy: Any = "float16", **kwargs: Any) -> mx.sym.Symbol:
        recorder.note_policy(read_policy(policy)[0])
        return sym

    if mode == "plain":
        return {
            Module: type("Module", (_PlainSingle,), name),
            BucketingModule: type("BucketingModule", (_PlainBucketing,), name),
            cast_symbol: plain_cast,
        }
    name = {**name, "in_full": mode == "graph"}
    found: dict[Any, Any] = {
        Module: type("Module", (_RecordedModule,), name),
        BucketingModule: type("BucketingModule", (_InFull, BucketingModule), name),
    }
    return {**found, cast_symbol: lambda sym, *args, **kwargs: sym} if mode == "graph" else found
