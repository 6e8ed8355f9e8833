"""``BucketingModule``: one ``Module`` per bucket, with shared master weights, loss scale and counters of steps."""

from __future__ import annotations

from typing import Any, Iterable

import mxnet as mx

from ..files import replacing
from ..messages import check_keywords, keywords_of
from ..policy import Policy
from ..precision.plan import Plan
from ..step.step import ScaledStep, StepView
from .checkpoint import SavesParams, write_arrays, write_symbol
from .core import Core, refuse_policy_by_position
from .module import Module, require
from .reading import read_values


class BucketingModule(SavesParams, StepView, mx.mod.BucketingModule):
    """``mx.mod.BucketingModule`` in mixed precision: the same constructor and methods, with three more keywords.

    All buckets share the parameters, the master weights, the loss scale and the counters of steps. The default bucket
    must have all parameters, as in MXNet; its graph decides which of them are stored in float16.

    Parameters
    ----------
    *args, **kwargs
        ``sym_gen``, ``default_bucket_key`` and the other arguments of ``mx.mod.BucketingModule``.
        ``compression_params`` must be None, otherwise ``bind`` or ``load`` raises ``ValueError``.
    policy : str, Policy or Plan
        A recipe (``print(Policy.recipes())``), a policy string such as ``"compute=float16,norm=compute"``, a Policy, a
        Plan of the default bucket's Symbol, or the path of a saved Plan. In another bucket, a Plan decides for the
        operators that have the same name and type in the default bucket, and the rules decide for all others.
    exclude : iterable of str
        Patterns, as of ``fnmatch``, for names of operators to keep in FP32, besides the policy's own. ``["stage1"]``
        keeps ``"stage1"`` and names that begin with ``"stage1_"``. Must be empty with a Plan.
    loss_scale : {"dynamic"}, float, None or a scaler
        ``"dynamic"`` adapts the loss scale for float16 and does not scale for bfloat16. A number is a fixed loss scale,
        None is no loss scaling. A scaler is an object such as ``mxmp.DynamicLossScaler(init_scale=1024)``.

    Attributes
    ----------
    core : Core
        What all buckets share: the policy or plan, the master weights, the loss scale and the counters of steps.

    Raises
    ------
    ValueError
        The policy is unknown; ``bind`` or ``load`` raises it if the device lacks what the policy needs (bfloat16 on a
        GPU).
    OSError
        The file of a Plan cannot be read.

    Examples
    --------
    >>> def unrolled(length):
    ...     word = mx.sym.Embedding(mx.sym.var("data"), input_dim=10, output_dim=4, name="embed")
    ...     out = mx.sym.FullyConnected(mx.sym.mean(word, axis=1), num_hidden=2, name="fc")
    ...     return mx.sym.SoftmaxOutput(out, name="softmax"), ["data"], ["softmax_label"]
    >>> module = mxmp.BucketingModule(unrolled, default_bucket_key=20, policy="float16")
    >>> module.bind([("data", (8, 20))], [("softmax_label", (8,))])
    >>> module.init_params()
    >>> module.loss_scale
    65536.0
    """

    def __init__(
        self,
        *args: Any,
        policy: str | Policy | Plan = "float16",
        exclude: Iterable[str] = (),
        loss_scale: Any = "dynamic",
        **kwargs: Any,
    ) -> None:
        self._curr_module: Any
        check_keywords(type(self).__name__, kwargs, keywords_of(type(self)))
        refuse_policy_by_position(args[2:])  # a bucket's key may be any text
        sym_gen = args[0] if args else kwargs.get("sym_gen")
        if isinstance(sym_gen, (mx.sym.Symbol, mx.gluon.Block)):
            raise TypeError(
                "sym_gen must be a function from a bucket's key to a Symbol, the names of its data and those of its "
                f"labels, got {type(sym_gen).__name__}: a network of one Symbol is mxmp.Module(symbol)"
            )
        super().__init__(*args, **kwargs)
        self.core = Core(policy, exclude, loss_scale)

    def _new_module(self, key: Any) -> Module:
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

    def _call_sym_gen(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._call_sym_gen(*args, **kwargs)
        if not isinstance(made, (tuple, list)) or len(made) != 3:
            raise TypeError(
                f"sym_gen(key) must return a Symbol, the names of its data and those of its labels, such as "
                f"(symbol, ['data'], ['softmax_label']), got {type(made).__name__}"
            )
        return made

    # If ``_buckets`` has no module for a bucket, MXNet's methods make one of MXNet's own class. So each method below
    # puts an mxmp.Module there first.

    def _reset_bind(self) -> None:
        super()._reset_bind()
        self._buckets[self._default_bucket_key] = self._new_module(self._default_bucket_key)

    def bind(self, *args: Any, **kwargs: Any) -> None:
        """Bind executors of the default bucket with casts; takes the arguments of MXNet's ``BucketingModule.bind``.

        The first call decides which parameters are stored in float16. Raises the errors of ``mxmp.Module.bind``.
        """
        if self._default_bucket_key not in self._buckets:
            self._buckets[self._default_bucket_key] = self._new_module(self._default_bucket_key)
        super().bind(*args, **kwargs)

    def switch_bucket(self, bucket_key: Any, data_shapes: Any, label_shapes: Any = None) -> None:
        """Make the bucket with this key the current one, whose module ``backward``, ``update`` and ``get_outputs`` use.

        ``forward`` calls it with the key and shapes of its batch. At the first use of a key, a module is made for the
        bucket and bound, and gets the ``mx.mon.Monitor`` that is installed, if any. If making or binding it raises an
        error, the current bucket stays, and the next call with the key tries again.
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

    def init_optimizer(self, *args: Any, **kwargs: Any) -> None:
        """Create the optimizer and the master weights that all buckets share; see ``mxmp.Module.init_optimizer``.

        Any bucket may be the current one: the default bucket's module, which has all parameters, creates them. After
        ``load(..., load_optimizer_states=True)`` it also reads the states file. Raises the errors of
        ``mxmp.Module.init_optimizer``.
        """
        current, self._curr_module = self._curr_module, self._default_module()
        try:
            super().init_optimizer(*args, **kwargs)
            self._params_dirty = True  # a states file that ``load`` was asked for may have set master weights
        finally:
            self._curr_module = current

    def save_checkpoint(
        self, prefix: str, epoch: int, save_optimizer_states: bool = False, remove_amp_cast: bool = False
    ) -> None:
        """Save the FP32 parameters, and the FP32 Symbol of each bucket that was used, as MXNet's method does.

        For epoch 1 and a bucket with the key 10 the files are ``PREFIX-0001.params``, ``PREFIX-10-symbol.json`` and
        ``PREFIX.buckets``, an int32 NDArray of the keys. With ``save_optimizer_states``, which MXNet's method lacks and
        ``mx.callback.module_checkpoint`` passes, ``PREFIX-0001.states`` has what ``save_optimizer_states`` writes. Each
        file appears completely or not at all. With ``remove_amp_cast=True``, ``amp_cast`` operators of the user's own
        Symbols are left out. Waits for the device. Raises ``OSError``, which names the file, if one cannot be written;
        the files that this call has written before it stay. Raises ``TypeError``, and writes nothing, if an int32 array
        cannot hold the keys, such as ``"a"``; likewise ``RuntimeError`` for states before ``init_optimizer``.
        """
        keys = mx.nd.array(list(self._buckets), dtype="int32")
        if save_optimizer_states:
            require(self, optimizer=True)
        self.save_params(f"{prefix}-{epoch:04d}.params")
        for key in self._buckets:
            symbol, _, _ = self._call_sym_gen(key)
            with replacing(f"{prefix}-{key}-symbol.json") as path:
                write_symbol(path, symbol, remove_amp_cast)
        with replacing(f"{prefix}.buckets") as path:
            write_arrays(path, [keys])
        if save_optimizer_states:
            self.save_optimizer_states(f"{prefix}-{epoch:04d}.states")

    def save_optimizer_states(self, fname: str) -> None:
        """Save optimizer states, master weights, the loss scale and the counters of steps in one file.

        ``load_optimizer_states`` reads it. The file appears completely or not at all. Waits for the device. Raises
        ``RuntimeError`` before ``init_optimizer``, ``OSError`` if the file cannot be written.
        """
        self._default_module().save_optimizer_states(fname)

    def load_optimizer_states(self, fname: str) -> None:
        """Load a file of ``save_optimizer_states`` of mxmp or MXNet, as ``Module.load_optimizer_states`` does.

        Raises ``ValueError`` if the file is damaged or was saved with other parameters or another optimizer,
        ``OSError`` if it cannot be read, ``RuntimeError`` before ``init_optimizer``. After an error nothing has
        changed.
        """
        self._default_module().load_optimizer_states(fname)
        self._params_dirty = True

    def check_optimizer_states(self, fname: str) -> None:
        """Raise the errors of ``load_optimizer_states`` for a file that it cannot load; change nothing."""
        self._default_module().check_optimizer_states(fname)

    def discard(self) -> None:
        """Leave this step out: drop the gradients of the current bucket, instead of ``update``; see ``Module.discard``.

        Raises ``RuntimeError`` before ``bind``.
        """
        self._default_module()
        self._curr_module.discard()
        self._params_dirty = True

    @property
    def modules(self) -> dict[Any, Module]:
        """Return a new dict from the key of each bucket that has a module to this module.

        ``bind`` or ``load`` makes the module of the default bucket, the first ``switch_bucket`` that of any other.
        """
        return dict(self._buckets)

    def _default_module(self) -> Module:
        if self._default_bucket_key not in self._buckets:
            raise RuntimeError("bind() first: the default bucket's graph decides the precision")
        return self._buckets[self._default_bucket_key]

    @property
    def scaled_step(self) -> ScaledStep:
        """Return the ``ScaledStep`` of all buckets: it applies or skips updates and keeps loss scale and counters."""
        return self.core.step

    @classmethod
    def load(
        cls,
        prefix: str,
        epoch: int,
        sym_gen: Any = None,
        default_bucket_key: Any = None,
        load_optimizer_states: bool = False,
        **kwargs: Any,
    ) -> BucketingModule:
        """Return a BucketingModule with the FP32 parameters of a checkpoint, ``PREFIX-0001.params`` for epoch 1.

        ``sym_gen`` and ``default_bucket_key`` have defaults but are required: the Symbols come from ``sym_gen``, not
        from the checkpoint. With ``load_optimizer_states=True``, ``init_optimizer`` will load ``PREFIX-0001.states``,
        and raise ``OSError`` if it cannot be read. ``kwargs`` are the constructor's other arguments: ``policy``,
        ``exclude``, ``loss_scale``, ``context``, ... Raises ``ValueError`` if the file is missing or damaged,
        ``AssertionError`` without ``default_bucket_key`` and ``TypeError`` without ``sym_gen``.
        """
        refuse_policy_by_position([load_optimizer_states])
        module = cls(sym_gen, default_bucket_key, **kwargs)
        args, auxs = read_values(f"{prefix}-{epoch:04d}.params")
        module.start_from(args, auxs, f"{prefix}-{epoch:04d}.states" if load_optimizer_states else None)
        return module

    def start_from(self, arg_params: dict, aux_params: dict, states: str | None = None) -> None:
        """Set the FP32 parameters and auxiliary states, by name, of a BucketingModule that is not bound yet.

        ``load`` calls it with those of a checkpoint. Makes the module of the default bucket, which holds them until
        ``bind`` copies them into executors. ``states`` is the path of a file of ``save_optimizer_states`` for
        ``init_optimizer`` to load; None for no file.
        """
        default = self._buckets[self._default_bucket_key] = self._new_module(self._default_bucket_key)
        default.start_from(arg_params, aux_params, states)
        self.params_initialized = True
        self._curr_module = default
