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
    """``mx.mod.BucketingModule`` in mixed precision: the same constructor and methods, with three more keywords.

    All buckets share the parameters, the master weights, the loss scale and the counters of steps. The default bucket's
    graph decides which parameters are stored in low precision.

    Parameters
    ----------
    *args, **kwargs
        ``sym_gen``, ``default_bucket_key`` and the other arguments of ``mx.mod.BucketingModule``.
        ``compression_params`` must be None.
    policy : str, Policy or Plan
        A recipe (``print(Policy.recipes())``), a policy string, a Policy, a Plan of the default bucket's Symbol, or the
        path of a saved Plan. Other buckets follow a Plan where they have operators of the same names and types, and
        the rules elsewhere.
    exclude : iterable of str
        Patterns of names of operators or blocks to keep in FP32, for example ``["fc*"]``, added to those of the policy.
    loss_scale : {"dynamic"}, float, None or a scaler
        ``"dynamic"`` adapts the loss scale for float16 and does not scale for bfloat16. A number is a fixed loss scale,
        None is no loss scaling.

    Attributes
    ----------
    core : Core
        The masters, the conversion and the loss-scaled step, which all buckets share.
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

    def _new_module(self, key: Any) -> Module:
        """Return a new, unbound ``Module`` for the bucket with this key, which shares this object's ``core``."""
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

    # If ``_buckets`` has no module for a bucket, MXNet's methods make one of MXNet's own class. So each method below
    # puts an mxmp.Module there first.

    def _reset_bind(self) -> None:
        """Forget the modules of all buckets, as MXNet's method, and make a new one for the default bucket."""
        super()._reset_bind()
        self._buckets[self._default_bucket_key] = self._new_module(self._default_bucket_key)

    def bind(self, *args: Any, **kwargs: Any) -> None:
        """Bind the default bucket as ``Module.bind``; the arguments are those of ``mx.mod.BucketingModule.bind``."""
        if self._default_bucket_key not in self._buckets:
            self._buckets[self._default_bucket_key] = self._new_module(self._default_bucket_key)
        super().bind(*args, **kwargs)

    def switch_bucket(self, bucket_key: Any, data_shapes: Any, label_shapes: Any = None) -> None:
        """Make the bucket with this key the current one, for which ``forward``, ``backward`` and ``update`` are.

        The arguments are those of ``mx.mod.BucketingModule.switch_bucket``. The first time, a module is made for the
        bucket and bound, and an installed monitor is installed in it too. If that fails, the bucket is not kept.
        """
        fresh = bucket_key not in self._buckets
        if fresh:
            self._buckets[bucket_key] = self._new_module(bucket_key)
        try:
            super().switch_bucket(bucket_key, data_shapes, label_shapes)
        except BaseException:
            if fresh:
                del self._buckets[bucket_key]
            raise
        if fresh and self._monitor is not None:
            self._curr_module.install_monitor(self._monitor)

    def save_checkpoint(self, prefix: str, epoch: int, remove_amp_cast: bool = False) -> None:
        """Save the FP32 parameters and the FP32 Symbol of each bucket so far, in the files of MXNet's method.

        The files are ``PREFIX-0001.params`` for epoch 1, ``PREFIX-KEY-symbol.json`` for each bucket, and
        ``PREFIX.buckets`` with all keys, which must be numbers. Each appears completely or not at all.
        ``remove_amp_cast`` leaves out operators ``amp_cast`` of the user's own Symbols. Waits for the device. Raises
        ``OSError``, which names the file, if one cannot be written.
        """
        self.save_params(f"{prefix}-{epoch:04d}.params")
        for key in self._buckets:
            symbol, _, _ = self._call_sym_gen(key)
            with replacing(f"{prefix}-{key}-symbol.json") as path:
                write_symbol(path, symbol, remove_amp_cast)
        with replacing(f"{prefix}.buckets") as path:
            write_arrays(path, [mx.nd.array(list(self._buckets), dtype="int32")])

    def save_optimizer_states(self, fname: str) -> None:
        """Save optimizer states, master weights, the scaler and the counters of steps, as ``Module`` does.

        The file appears completely or not at all. Waits for the device. Raises ``RuntimeError`` before
        ``init_optimizer``.
        """
        self._default_module().save_optimizer_states(fname)

    def load_optimizer_states(self, fname: str) -> None:
        """Load a file of ``save_optimizer_states``, or of MXNet's module, as ``Module.load_optimizer_states`` does.

        Raises ``ValueError`` if the file is damaged or of other parameters or another optimizer, and ``RuntimeError``
        before ``init_optimizer``. Nothing has changed then.
        """
        self._default_module().load_optimizer_states(fname)
        self._params_dirty = True

    @property
    def modules(self) -> dict[Any, Module]:
        """Return the module of every bucket that was made so far, by the bucket's key, in a new dict."""
        return dict(self._buckets)

    def _default_module(self) -> Module:
        """Return the module of the default bucket. Raises ``RuntimeError`` before ``bind``."""
        if self._default_bucket_key not in self._buckets:
            raise RuntimeError("bind() first: the default bucket's graph decides the precision")
        return self._buckets[self._default_bucket_key]

    @property
    def scaled_step(self) -> ScaledStep:
        """Return the object that checks gradients and has the scaler and the counters of steps, for all buckets."""
        return self.core.step

    @classmethod
    def load(
        cls, prefix: str, epoch: int, sym_gen: Any = None, default_bucket_key: Any = None, **kwargs: Any
    ) -> BucketingModule:
        """Return a BucketingModule with the parameters of a checkpoint, as ``mx.mod.BucketingModule.load`` does.

        The file is ``PREFIX-0001.params`` for epoch 1, in FP32. ``kwargs`` are the other arguments of the constructor:
        ``policy``, ``exclude``, ``loss_scale``, ``context``, ... Raises ``mxnet.MXNetError`` if the file is missing or
        damaged.
        """
        module = cls(sym_gen, default_bucket_key, **kwargs)
        module.start_from(*mx.model.load_params(prefix, epoch))
        return module

    def start_from(self, arg_params: dict, aux_params: dict) -> None:
        """Set the FP32 parameters and auxiliary states, by name, that the module has from ``bind`` on.

        Call it before ``bind``. It makes the module of the default bucket, which holds them.
        """
        default = self._buckets[self._default_bucket_key] = self._new_module(self._default_bucket_key)
        default.start_from(arg_params, aux_params)
        self.params_initialized = True
        self._curr_module = default
