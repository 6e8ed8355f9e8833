"""``BucketingModule``: one ``Module`` per bucket, with shared masters, scaler and counters."""

from __future__ import annotations

from typing import Any, Iterable

import mxnet as mx

from ..files import replacing
from ..policy import Policy
from ..precision.plan import Plan
from ..step.step import ScaledStep, StepView
from .checkpoint import SavesParams, write_arrays, write_symbol
from .core import Core
from .module import Module

__all__ = ["BucketingModule"]


class BucketingModule(SavesParams, StepView, mx.mod.BucketingModule):
    """``mx.mod.BucketingModule`` in mixed precision: all buckets share masters, scaler and counters.

    Parameters
    ----------
    sym_gen, default_bucket_key, ...
        As for ``mx.mod.BucketingModule``.
    policy, exclude, loss_scale
        As for ``Module``. The default bucket's graph decides which parameters are stored in low precision. A Plan is
        of that graph; other buckets' graphs follow it where they have the same operators.
    """

    def __init__(
        self,
        *args: Any,
        policy: str | Policy | Plan = "float16",
        exclude: Iterable[str] = (),
        loss_scale: Any = "dynamic",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.core = Core(policy, exclude, loss_scale)

    def _module(self, key: Any) -> Module:
        symbol, data_names, label_names = self._call_sym_gen(key)
        module = Module(
            symbol,
            data_names,
            label_names,
            logger=self.logger,
            context=self._context,
            work_load_list=self._work_load_list,
            fixed_param_names=self._fixed_param_names,
            state_names=self._state_names,
            group2ctxs=self._group2ctxs,
            compression_params=self._compression_params,
            policy=self.core.conversion.how,
            loss_scale=self.core.step.scaler,
        )
        module.core = self.core
        return module

    # MXNet's methods bind the module of a bucket if there is one, and otherwise make one of MXNet's class. So a module
    # of ours is put there first.

    def _reset_bind(self) -> None:
        super()._reset_bind()
        self._buckets[self._default_bucket_key] = self._module(self._default_bucket_key)

    def bind(self, *args: Any, **kwargs: Any) -> None:
        if self._default_bucket_key not in self._buckets:
            self._buckets[self._default_bucket_key] = self._module(self._default_bucket_key)
        super().bind(*args, **kwargs)

    def switch_bucket(self, bucket_key: Any, data_shapes: Any, label_shapes: Any = None) -> None:
        fresh = bucket_key not in self._buckets
        if fresh:
            self._buckets[bucket_key] = self._module(bucket_key)
        try:
            super().switch_bucket(bucket_key, data_shapes, label_shapes)
        except BaseException:
            if fresh:
                del self._buckets[bucket_key]
            raise
        if fresh and self._monitor is not None:
            self._curr_module.install_monitor(self._monitor)

    def save_checkpoint(self, prefix: str, epoch: int, remove_amp_cast: bool = False) -> None:
        """Save as ``mx.mod.BucketingModule.save_checkpoint``; each file appears completely or not at all."""
        self.save_params(f"{prefix}-{epoch:04d}.params")
        for key in self._buckets:
            symbol, _, _ = self._call_sym_gen(key)
            with replacing(f"{prefix}-{key}-symbol.json") as path:
                write_symbol(path, symbol, remove_amp_cast)
        with replacing(f"{prefix}.buckets") as path:
            write_arrays(path, [mx.nd.array(list(self._buckets), dtype="int32")])

    def save_optimizer_states(self, fname: str) -> None:
        """Save as ``Module.save_optimizer_states``."""
        self._default().save_optimizer_states(fname)

    def load_optimizer_states(self, fname: str) -> None:
        """Load as ``Module.load_optimizer_states``."""
        self._default().load_optimizer_states(fname)
        self._params_dirty = True

    @property
    def modules(self) -> dict[Any, Module]:
        """Return the module of every bucket so far, by its key."""
        return dict(self._buckets)

    def _default(self) -> Module:
        if self._default_bucket_key not in self._buckets:
            raise RuntimeError("bind() first: the default bucket's graph decides the precision")
        return self._buckets[self._default_bucket_key]

    @property
    def scaled_step(self) -> ScaledStep:
        return self.core.step

    @classmethod
    def load(
        cls, prefix: str, epoch: int, sym_gen: Any = None, default_bucket_key: Any = None, **kwargs: Any
    ) -> BucketingModule:
        """Load as ``mx.mod.BucketingModule.load``; takes ``policy``, ``exclude`` and ``loss_scale`` too."""
        module = cls(sym_gen, default_bucket_key, **kwargs)
        module.start_from(*mx.model.load_params(prefix, epoch))
        return module

    def start_from(self, arg_params: dict, aux_params: dict) -> None:
        """Take these FP32 parameters, before ``bind``."""
        default = self._buckets[self._default_bucket_key] = self._module(self._default_bucket_key)
        default.start_from(arg_params, aux_params)
        self.params_initialized = True
        self._curr_module = default
