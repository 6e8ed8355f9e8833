"""``Module``: MXNet's ``mx.mod.Module`` in mixed precision, with loss scaling and a check of each step's gradients.
Symbol, parameters and checkpoints are the user's, in FP32. Executors are bound to a private Symbol with casts and,
before loss heads, the loss scale.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..host.files import replacing
from ..kernels.fit import device_of
from ..kernels.fusion import unfused
from ..messages.callers import is_called_by_user, warn_user
from ..messages.keywords import check_keywords, keywords_of
from ..messages.refusals import inputs_explained
from ..pipeline import Use
from ..policy import Policy
from ..precision.casts import UNKNOWN
from ..precision.decide import check_policy
from ..precision.heads import SCALE_NAME
from ..precision.plan import Plan
from ..precision.subgraphs import refuse_fused
from ..step import stores
from ..step.gradients import Gradient, non_finite
from ..step.masters import Weight
from ..step.python_operators import true_gradients
from ..step.step import ScaledStep, StepView
from ..step.updater import Update, check_optimizer, exposed_pairs
from . import _mxnet
from .checkpoint import SavesParams, write_symbol
from .core import Core, Inputs, NamedUpdaters, refuse_policy_by_position


class Module(SavesParams, StepView, mx.mod.Module):
    """``mx.mod.Module`` in mixed precision: the same constructor and methods, with three more keywords.

    The symbol, the parameters and the checkpoints that a user sees are those of the FP32 network. Executors run a
    private Symbol with casts. ``update`` checks the gradients, and skips the step if one is not finite.

    Parameters
    ----------
    symbol : Symbol
        The FP32 network.
    *args, **kwargs
        ``data_names``, ``label_names`` and the other arguments of ``mx.mod.Module``. ``compression_params`` must be
        None.
    policy : str, Policy or Plan
        A recipe (``print(Policy.recipes())``), a policy string such as ``"compute=float16,norm=compute"``, a Policy, a
        Plan that was made for ``symbol``, or the path of a saved Plan.
    exclude : iterable of str
        Patterns, as of ``fnmatch``, for names of operators to keep in FP32, besides the policy's own. ``["stage1"]``
        keeps ``"stage1"`` and names that begin with ``"stage1_"``. Must be empty with a Plan.
    loss_scale : {"dynamic"}, float, None or a scaler
        ``"dynamic"`` adapts the loss scale for float16 and does not scale for bfloat16. A number is a fixed loss scale,
        None is no loss scaling. A scaler is an object such as ``mxmp.DynamicLossScaler(init_scale=1024)``. The loss
        scale multiplies the gradients that loss heads write and those that ``backward`` is given, and is divided out in
        the update. ``grad_scale`` of loss heads and ``rescale_grad`` of the optimizer keep their meaning.

    Attributes
    ----------
    plan : Plan or None
        The dtype that each operator computes in, and why; None before ``bind``.
    core : Core
        The policy or plan, the master weights, the loss scale and the counters of steps. All buckets of a
        ``BucketingModule`` share one.
    requested_gradients : mapping of str to str
        From the name of each parameter and input to ``"write"``, ``"add"`` or ``"null"``, as ``grad_req`` of ``bind``
        says; ``"null"`` for fixed parameters, labels, and data without ``inputs_need_grad``. Empty before ``bind``, and
        if ``grad_req`` was not a single string.
    running : list of Gradient
        The name and array of each auxiliary state on each device, as a Gradient, since ``RunningStatistics.watch``
        takes such pairs. A module that was bound with ``shared_module`` has the list of that module, which has them
        all. Empty before ``bind``.

    Raises
    ------
    TypeError
        ``symbol`` is no Symbol.
    ValueError
        The constructor raises it if the policy is unknown or needs what the device lacks (bfloat16 on a GPU), if
        operators of ``symbol`` were fused, as ``optimize_for_inference`` does, or if ``compression_params`` is not
        None, which would change gradients before they are checked.
    OSError
        The file of a Plan cannot be read.

    Examples
    --------
    >>> data = mx.sym.var("data")
    >>> out = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(data, num_hidden=2, name="fc"), name="softmax")
    >>> module = mxmp.Module(out, policy="float16", loss_scale=128.0)
    >>> batches = mx.io.NDArrayIter(mx.nd.random.uniform(shape=(32, 4)), mx.nd.zeros(32), batch_size=8)
    >>> module.fit(batches, num_epoch=1, optimizer_params={"learning_rate": 0.1})
    >>> module.skipped_steps, module.loss_scale
    (0, 128.0)
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
            from ..messages.networks import instead

            raise TypeError(f"Module takes an mxnet Symbol, got {type(symbol).__name__}{instead(symbol, True)}")
        refuse_fused(symbol)
        check_keywords(type(self).__name__, kwargs, keywords_of(type(self)))
        refuse_policy_by_position(args)
        _check_names({**dict(zip(("data_names", "label_names"), args)), **kwargs})
        self.core = Core(policy, exclude, loss_scale)
        self.plan: Plan | None = None
        self.requested_gradients: Mapping[str, str] = {}
        self.running: list[Gradient] = []
        self._symbol: Any
        self._arg_params: Any
        self._kvstore: Any
        self._params_dirty: bool
        self._optimizer: Any
        self._preload_opt_states: str | None
        self.optimizer_initialized: bool
        super().__init__(symbol, *args, **kwargs)
        self._device = device_of(self._context[0])
        check_policy(self.policy, self._device)
        stores.refuse_compression(self._compression_params)
        self._inference_graphs: list[Any] = []
        self._monitored = False
        self.awaits_backward = False  # whether the last forward was one of training, without a backward since
        self.before_forward: list[Callable[[], None]] = []  # called once, by the next forward

    @classmethod
    def load(cls, prefix: str, epoch: int, load_optimizer_states: bool = False, **kwargs: Any) -> Module:
        """Return a Module with the Symbol and the parameters of a checkpoint, as ``mx.mod.Module.load`` does.

        Raises ``ValueError``, which names the file, if that of the Symbol or of the parameters is missing or damaged.

        Parameters
        ----------
        prefix : str
        epoch : int
            The files are ``PREFIX-symbol.json`` and ``PREFIX-0001.params`` for epoch 1. Both hold the FP32 network.
        load_optimizer_states : bool
            If True, ``init_optimizer`` will load ``PREFIX-0001.states``, and raise ``OSError`` if it cannot be read.
        **kwargs
            The other arguments of ``Module``: ``policy``, ``exclude``, ``loss_scale``, ``context``, ...
        """
        from .reading import read_symbol, read_values

        refuse_policy_by_position([load_optimizer_states])
        symbol, args, auxs = read_symbol(f"{prefix}-symbol.json"), *read_values(f"{prefix}-{epoch:04d}.params")
        module = cls(symbol, **kwargs)
        module.start_from(args, auxs, f"{prefix}-{epoch:04d}.states" if load_optimizer_states else None)
        return module

    def start_from(self, arg_params: dict, aux_params: dict, states: str | None = None) -> None:
        """Set the FP32 parameters and auxiliary states, by name, of a Module that is not bound yet; ``load`` calls it.

        ``states`` is the path of a file of ``save_optimizer_states`` for ``init_optimizer`` to load; None for no file.
        """
        self._arg_params, self._aux_params = arg_params, aux_params
        self.params_initialized = True
        self._preload_opt_states = states

    @property
    def policy(self) -> Policy:
        """Return the policy of the module, or of its Plan; ``policy.exclude`` has what ``guard`` moved to FP32, too."""
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
        """Bind executors of the FP32 Symbol with casts; the arguments are those of ``mx.mod.Module.bind``.

        Sets ``plan``. The first ``bind`` decides which parameters are stored in float16, and warns if no operator
        computes in low precision, or if what ``exclude``, ``low_ops`` or ``full_ops`` names is in vain. The policy,
        loss scale and master weights of a ``shared_module`` replace this module's own. Like MXNet's, it warns and does
        nothing if the module is bound already, unless ``force_rebind``.

        Raises
        ------
        ValueError
            An operator has no rule, the Plan is of another Symbol or device, ``shared_module`` is not an mxmp Module,
            or ``grad_req`` is a list with another number of values than the Symbol has arguments.
        """
        data_shapes, label_shapes = list(data_shapes), None if label_shapes is None else list(label_shapes)
        fresh, binds = self._arg_params is None, force_rebind or not self.binded
        original = self._symbol
        if binds:
            grad_req = self._named_requests(grad_req)
            if shared_module is not None:
                self._share(shared_module)
            elif self.binded and self.params_initialized and self._params_dirty:
                self._sync_params_from_devices()  # MXNet would bind the values from before the last steps
            self.core.trains = self.core.trains or for_training
            inputs = _inputs([*data_shapes, *(label_shapes or ())], self._context)
            wanted = {*self._param_names, *(desc[0] for desc in data_shapes if inputs_need_grad)}
            self.requested_gradients = self._requests(grad_req, wanted, inputs)
            use = Use(
                self._device,
                self._param_names,
                grad_req=self.requested_gradients,
                training_shapes=inputs.shapes if for_training else {},
                non_fp32=inputs.non_fp32,
                keep_output_names=True,
            )
            low, self.plan = self.core.low_symbol(original, use, inputs, for_training=for_training)
            # oneDNN's fusion is wrong for inference where a convolution feeds an activation and a skip: 7 % off in
            # bfloat16 on a ResNet-50 v2, against 0.5 % without it.
            self._symbol = unfused(low, self._context, self._group2ctxs)
        try:
            with inputs_explained(desc for desc in data_shapes if isinstance(desc, mx.io.DataDesc)):
                super().bind(
                    data_shapes, label_shapes, for_training, inputs_need_grad, force_rebind, shared_module, grad_req
                )
        finally:
            self._symbol = original
        if fresh and shared_module is None:
            for name in self.core.low_names & set(self._param_names):
                self._arg_params[name] = mx.nd.zeros(self._arg_params[name].shape)
        if binds:
            # Executors that share memory, or that ``reshape`` makes, have the same arrays in other objects.
            group = self._exec_group
            own = [Gradient(name, a) for name, arrays in zip(group.aux_names, group.aux_arrays) for a in arrays]
            self.running = own if shared_module is None else shared_module.running
            self.core.add_module(self)
            self._monitored = self.awaits_backward = False
            self._inference_graphs = [] if inputs.half else self._make_inference_graphs()
            self._fuse_inference()

    def _named_requests(self, grad_req: Any) -> Any:
        """Return ``grad_req``, a list as a dict by argument: executors have one argument more, the loss scale."""
        if not isinstance(grad_req, (list, tuple)):
            return grad_req
        arguments = self._symbol.list_arguments()
        if len(grad_req) != len(arguments):
            raise ValueError(
                f"grad_req has {len(grad_req)} values for the {len(arguments)} arguments of the Symbol "
                f"({', '.join(arguments[:5])}, ...): give one for each, in the order of list_arguments()"
            )
        return dict(zip(arguments, grad_req))

    def _share(self, other: Any) -> None:
        if not isinstance(other, Module):
            raise ValueError(f"shared_module: got {type(other)}; expected an mxmp.Module, for its policy")
        self.core = other.core
        self.core.shared = True

    def _requests(self, grad_req: Any, wanted: Collection[str], inputs: Inputs) -> Mapping[str, str]:
        """Return the ``grad_req`` of parameters, data and labels; empty where it is not one for all."""
        if not isinstance(grad_req, str):
            return UNKNOWN
        trained = {*wanted}.difference(self._fixed_param_names)
        return {name: grad_req if name in trained else "null" for name in (*self._param_names, *inputs.shapes)}

    def reshape(self, data_shapes: Any, label_shapes: Any = None) -> None:
        """Bind executors for other shapes, with the same parameters, as ``mx.mod.Module.reshape``; ``plan`` stays."""
        super().reshape(data_shapes, label_shapes)
        self.awaits_backward = False
        self._fuse_inference()

    def _make_inference_graphs(self) -> list[Any]:
        """Return an InferenceGraph per device, or none unless the module only predicts, on CPUs, in bfloat16."""
        if (
            self.for_training
            or self._device != "cpu"
            or self.policy.compute != "bfloat16"
            or any(self._group2ctxs or ())
            or self._state_names
            or "MXNET_SUBGRAPH_BACKEND" in os.environ
        ):
            return []
        from .inference import InferenceGraph  # with mxmp.serving, which no training needs

        group = self._exec_group
        names = [*group.param_names, *group.aux_names]
        graphs = [InferenceGraph(self._symbol, self.core.conversion.how, names) for _ in group.execs]
        self.core.inference_graphs.update(graphs)
        return graphs

    def _fuse_inference(self) -> None:
        execs = self._exec_group.execs
        for i, graph in enumerate(self._inference_graphs):
            execs[i] = graph.executor(execs[i], self._knows_parameters, self.core.forget_copies)

    def _knows_parameters(self) -> bool:
        """Return whether only ``init_params`` and ``set_params`` can change the parameters, and no Monitor listens."""
        may_train = self.optimizer_initialized or (self.core.shared and self.core.trains)
        return not (self._monitored or self.core.exposed or may_train)

    def _forget_copies(self) -> None:
        """Mark the copies of parameters and running statistics as outdated, since a user has set these."""
        self.core.statistics.renew()
        self.core.forget_copies()

    def install_monitor(self, mon: Any) -> None:
        """Install a ``mx.mon.Monitor``, which then reports the tensors of the user's operators.

        Operators that mxmp inserted, such as casts, are not reported. All values are FP32 arrays; those of operators in
        low precision were rounded to the compute dtype. Gradients are multiplied by the loss scale. Raises
        ``RuntimeError`` if the module is not bound, or while ``watch`` or ``guard`` observes it.
        """
        if self.plan is None:
            raise RuntimeError("call bind() first: a monitor is installed in executors")
        if self.scaled_step.observers:
            raise RuntimeError("close() watch and guard first: MXNet calls one callback only")
        from .monitored import Monitored

        self._monitored = True
        for executor in self._exec_group.execs:
            mon.install(Monitored(executor, self._symbol, self.plan))

    @property
    def is_monitored(self) -> bool:
        """Return whether ``install_monitor`` was called since ``bind``."""
        return self._monitored

    def init_params(
        self,
        initializer: Any = mx.init.Uniform(0.01),  # noqa: B008  MXNet's
        arg_params: dict | None = None,
        aux_params: dict | None = None,
        allow_missing: bool = False,
        force_init: bool = False,
        allow_extra: bool = False,
    ) -> None:
        """Initialize parameters in FP32, as ``mx.mod.Module.init_params``; float16 arrays get the rounded values.

        Like MXNet's, it warns and does nothing if the parameters were initialized before, unless ``force_init``. Raises
        ``RuntimeError`` if a value is missing, and ``ValueError`` if one has another shape; then nothing has changed.
        """
        ignored = self.params_initialized and not force_init
        if self.binded and not ignored:
            for given, held in ((arg_params, self._arg_params), (aux_params, self._aux_params)):
                _check_values(given, held, missing=allow_missing, extra=True)
        super().init_params(initializer, arg_params, aux_params, allow_missing, force_init, allow_extra)
        if not ignored:
            self.core.set_masters(self._arg_params, self.arrays())
            self._forget_copies()

    def set_params(
        self,
        arg_params: dict,
        aux_params: dict,
        allow_missing: bool = False,
        force_init: bool = True,
        allow_extra: bool = False,
    ) -> None:
        """Set parameters and auxiliary states to FP32 values; the arguments are those of ``mx.mod.Module.set_params``.

        For a parameter that is stored in float16, the master weight, if there is one yet, gets the FP32 value, and the
        float16 array the rounded value. If they are initialized already, ``force_init=False`` sets none and warns.
        Raises ``RuntimeError`` if a value is missing, and ``ValueError`` if one has another shape, or, with
        ``allow_missing=True``, an unknown name without ``allow_extra``; then nothing has changed.
        """
        ignored = self.params_initialized and not force_init
        if self.binded and allow_missing and not ignored:
            inputs = {*self._data_names, *self._label_names, *self._state_names}  # MXNet sets these, too
            named = {name: value for name, value in (arg_params or {}).items() if name not in inputs}
            for given, held in ((named, self._arg_params), (aux_params, self._aux_params)):
                _check_values(given, held, missing=True, extra=allow_extra)
        super().set_params(arg_params, aux_params, allow_missing, force_init, allow_extra)
        if allow_missing and not ignored:
            low = {k: v for k, v in (arg_params or {}).items() if k in self.core.low_names}
            for name in low.keys() - self.core.masters.keys():  # no master weight has its FP32 value
                self._arg_params[name] = low[name].as_in_context(mx.cpu()).astype("float32")
            self.core.set_masters(low, self.arrays())
        self._forget_copies()

    def _sync_params_from_devices(self) -> None:
        # Copies of float16 parameters are the means of master weights; before ``init_optimizer`` they stay as they are.
        low = {name: self._arg_params[name].copy() for name in self.core.low_names}
        super()._sync_params_from_devices()
        self._arg_params.update({**low, **self.core.mean_masters(self.arrays())})

    @property
    def _exec_group(self) -> Any:
        # The user may write into float16 arrays.
        if is_called_by_user():
            self.core.expose()
        return self._group

    @_exec_group.setter
    def _exec_group(self, group: Any) -> None:
        self._group = group

    def arrays(self) -> dict[str, list[NDArray]]:
        """Return the executors' arrays of each parameter by name, one per device: float16 or FP32, as it is stored."""
        return dict(zip(self._exec_group.param_names, self._exec_group.param_arrays))

    # -- optimizer ----------------------------------------------------------------------------------

    def init_optimizer(
        self,
        kvstore: Any = "local",
        optimizer: Any = "sgd",
        optimizer_params: Any = (("learning_rate", 0.01),),
        force_init: bool = False,
    ) -> None:
        """Create the optimizer and the master weights; the arguments are those of ``mx.mod.Module.init_optimizer``.

        The kvstore only sums gradients: the module itself checks them and then updates the weights. ``kvstore`` may
        also be ``"horovod"``. With several workers, all start from the parameters of rank 0, and the call waits until
        this worker has received them. If there is an optimizer already, warns and does nothing, unless ``force_init``.
        After ``load(..., load_optimizer_states=True)``, the call also reads the states file, and raises the errors of
        ``load_optimizer_states``; after any error the next call reads it again.

        Raises
        ------
        RuntimeError
            ``bind`` or ``init_params`` was not called.
        ValueError
            The kvstore is ``dist_async``, which applies gradients before any check, or one that MXNet does not have;
            MXNet does not have the optimizer; or a parameter is row-sparse.
        TypeError
            The optimizer takes no such parameter.
        ImportError
            ``"horovod"`` without Horovod.
        """
        require(self, optimizer=False)
        if self.optimizer_initialized and not force_init:
            self.logger.warning("optimizer already initialized, ignoring...")
            return
        stores.check_kvstore(kvstore)
        check_optimizer(optimizer, optimizer_params)
        kvstore = stores.open_store(kvstore, "mxmp")
        arrays = self.arrays()
        for name, copies in arrays.items():
            stores.refuse_sparse_weight(name, copies[0].stype, f"mx.sym.var({name!r}) without stype=")
        # Another module with the same core may have updated the masters, which this one does not mark as dirty.
        if self._params_dirty or self.core.masters:
            self._sync_params_from_devices()
        preload, self._preload_opt_states = self._preload_opt_states, None
        try:
            self._make_optimizer(kvstore, optimizer, optimizer_params, force_init, arrays)
            if preload is not None:
                self.load_optimizer_states(preload)
        except BaseException:
            if preload is not None:
                self._preload_opt_states, self.optimizer_initialized = preload, False
            raise

    def _make_optimizer(
        self, kvstore: Any, optimizer: Any, optimizer_params: Any, force_init: bool, arrays: Mapping[str, list[NDArray]]
    ) -> None:
        with _mxnet.without_optimizer(kvstore, len(self._context)) as store, self._params_in_gradient_dtype():
            super().init_optimizer(store, optimizer, optimizer_params, force_init)
        self.core.make_masters(self._arg_params, arrays)
        _mxnet.number_weights_plainly(self._optimizer, list(arrays), len(self._context))
        self._updater = NamedUpdaters(self._optimizer, len(self._context), arrays)
        if self.has_other_workers:
            # MXNet's Module never sends rank 0's parameters to the other workers.
            stores.share_initial(self._kvstore, self._weights_by_key())
            self._params_dirty = True

    def borrow_optimizer(self, shared_module: Module) -> None:
        """Update this module's parameters by the optimizer of another module, and by its states, as MXNet's Module.

        ``bind`` with ``shared_module`` calls it. Raises ``ValueError`` if the other module is not an mxmp Module, or
        has no parameter of the same name for one of this module, or if this module stores parameters in float16 and was
        not bound with ``shared_module``: then it has no master weights that the optimizer could update.
        ``AssertionError`` if the other module has no optimizer.
        """
        if not isinstance(shared_module, Module):
            raise ValueError(f"borrow_optimizer: got {type(shared_module)}; expected an mxmp.Module")
        if shared_module.core is not self.core and self.core.low_names:
            raise ValueError("borrow_optimizer: parameters are stored in float16: bind with shared_module=... instead")
        if shared_module.optimizer_initialized:
            unknown = [name for name in self._param_names if name not in shared_module.updaters.numbers]
            if unknown:
                raise ValueError(f"borrow_optimizer: the optimizer does not update {', '.join(unknown[:5])}")
        super().borrow_optimizer(shared_module)

    def has_optimizer_of(self, other: Module) -> bool:
        """Return whether both modules update by the same optimizer and its states, which one has borrowed."""
        return self.updaters is other.updaters

    @property
    def updaters(self) -> NamedUpdaters:
        """Return the Updaters of the module's optimizer; a module that borrowed the optimizer has the same ones."""
        return self._updater

    def _weights_of_optimizer(self) -> list[Weight]:
        """Return the weights that the module's optimizer updates, in the order of their numbers."""
        found = {weight.name: weight for weight in self.core.weights(self.arrays())}
        absent = [name for name in self._updater.names if name not in found]
        if absent:
            raise RuntimeError(
                f"the optimizer is that of another module, which has {', '.join(absent[:5])} too: save or load its "
                "states by that module"
            )
        return [found[name] for name in self._updater.names]

    def _weights_by_key(self) -> dict[str, Weight]:
        # A key keeps the dtype of its first array, and "fc_weight" is that of the gradient, which may be float16.
        return {f"{weight.name}:initial": weight for weight in self.core.weights(self.arrays())}

    @contextmanager
    def _params_in_gradient_dtype(self) -> Iterator[None]:
        """Cast the module's CPU copies of parameters to the dtype of their gradients within the ``with`` block."""
        # MXNet initializes the keys of a kvstore with them. A float16 gradient that is pushed to an FP32 key of a
        # distributed store hangs the job.
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
        """Bind new executors after ``self.core.conversion`` got another policy; all other arguments of ``bind`` stay.

        The old executors' parameters, inputs, auxiliary states and outputs, which a metric may still read, are copied
        to the new ones. ``shared_module`` is the module whose memory a bucket's module shares, otherwise None.
        """
        before = list(self._exec_group.execs)
        shapes = self.data_shapes, self.label_shapes
        optimizer = self._optimizer, self._kvstore, self._updater
        had_one = self.optimizer_initialized
        self.bind(*shapes, self.for_training, self.inputs_need_grad, True, shared_module, self._grad_req)
        if had_one:  # ``bind`` borrows the optimizer of ``shared_module``
            self._optimizer, self._kvstore, self._updater = optimizer
        for old, new in zip(before, self._exec_group.execs):
            for values, arrays in ((old.arg_dict, new.arg_dict), (old.aux_dict, new.aux_dict)):
                for name in values.keys() & arrays.keys():
                    values[name].copyto(arrays[name])
            for value, array in zip(old.outputs, new.outputs):
                value.copyto(array)

    def remake_masters(self, weights: Mapping[str, Sequence[NDArray]]) -> None:
        """Create the master weights anew after ``rebind``, whose executors may store other parameters in float16.

        ``weights`` maps the name of each parameter to its FP32 values, one array per device. They are copied into the
        master weights and the executors' arrays of the same device; those in float16 get rounded values.
        """
        arrays = self.arrays()
        self.core.make_masters(self._arg_params, arrays)
        for name, copies in arrays.items():
            masters = self.core.masters.get(name)
            for value, array in zip(weights[name], masters or copies):
                value.copyto(array)
            if masters is not None:
                masters.round_into(copies)
        self._params_dirty = True

    def renew_store(self) -> None:
        """Replace the module's kvstore, if it has one, by a new one of the same type, with a key per parameter.

        A kvstore keeps the dtype of each key's first array, and after ``rebind`` gradients may have other dtypes.
        """
        if self._kvstore is None:
            return
        self._kvstore = mx.kv.create(self._kvstore.type)
        with self._params_in_gradient_dtype():
            for name in self._exec_group.param_names:
                self._kvstore.init(name, self._arg_params[name])

    @property
    def has_other_workers(self) -> bool:
        """Return whether the kvstore is distributed: its type contains "dist", or it has several workers (Horovod).

        True for ``"dist_sync"`` with one worker, too. False before ``init_optimizer``.
        """
        return stores.is_distributed(self._kvstore)

    # -- one step -----------------------------------------------------------------------------------

    def forward(self, data_batch: Any, is_train: bool | None = None) -> None:
        """Compute the outputs of a batch; the arguments are those of ``mx.mod.Module.forward``.

        The first call reads the data, and warns of digits that the first product would lose in low precision.
        """
        require(self, optimizer=False)
        self.call_before_forward()
        if self.plan is not None:
            arrays = dict(zip(self._data_names, getattr(data_batch, "data", None) or ()))
            self.core.look_at(arrays, self._symbol, self.plan)
        super().forward(data_batch, is_train)
        self.awaits_backward = self.for_training if is_train is None else bool(is_train)

    def call_before_forward(self) -> None:
        """Do what waits for the next forward; ``forward`` calls it."""
        while self.before_forward:
            self.before_forward.pop(0)()

    def backward(self, out_grads: Any = None) -> None:
        """Run backward with the loss multiplied by the loss scale.

        So the gradients in the executors are multiplied by the loss scale, and ``update`` divides them by it before it
        changes the weights. Does not wait for the device.

        Parameters
        ----------
        out_grads : NDArray or list of NDArray, optional
            The gradients of the outputs, not multiplied by the loss scale; None if all outputs are of loss heads.

        Raises
        ------
        RuntimeError
            ``bind`` or ``init_params`` was not called.
        """
        require(self, optimizer=False)
        group = self._exec_group
        inputs = zip(self._data_names, group.input_grad_arrays) if self.inputs_need_grad else ()
        found = [*zip(group.param_names, group.grad_arrays), *inputs]
        sums = [array for name, arrays in found if group.grad_req[name] == "add" for array in arrays]
        self.scaled_step.note_own_backward(sums)
        scale = self.loss_scale
        self.set_head_scale(scale)
        if out_grads is not None:
            out_grads = [g * scale for g in ([out_grads] if isinstance(out_grads, NDArray) else out_grads)]
        self.core.statistics.watch(self.running)
        with true_gradients(scale):
            super().backward(out_grads)
        self.awaits_backward = False

    def set_head_scale(self, scale: float) -> None:
        """Set the loss scale by which the executors' backward multiplies the gradients that loss heads write.

        Does nothing if the executors have no argument for it (``Core.low_symbol``).
        """
        for executor in self._exec_group.execs:
            if SCALE_NAME in executor.arg_dict:
                executor.arg_dict[SCALE_NAME][:] = scale

    def update(self) -> None:
        """Sum the gradients over devices and workers, check them, and update the weights or skip the step.

        The step is skipped if a gradient has an inf or NaN on any device; then no weight and no optimizer state
        changes. Either way the scaler adjusts the loss scale. Waits for the device once.
        Warns if no backward came since the last update and the loss scale has changed: the gradients hold the old one.

        Raises
        ------
        RuntimeError
            ``bind``, ``init_params`` or ``init_optimizer`` was not called, or the module was bound with
            ``for_training=False``.
        FloatingPointError
            The third skipped step in a row at a loss scale that cannot fall (the lowest, a fixed one, or no loss
            scaling); names the parameters.
        """
        require(self, optimizer=True)
        self._require_gradients()
        if self.scaled_step.stale_scale:
            warn_user(
                "update() without a backward since the last one: the gradients are divided by the loss scale of now, "
                f"{self.loss_scale:g}, and those of the last backward hold {self.scaled_step.stale_scale:g}. Call "
                "backward() before each update; gradients of your own must hold module.loss_scale"
            )
        kvstore, updates = self._kvstore, self._sum_gradients()
        self._params_dirty = True

        def apply() -> None:
            # The optimizer SGLD adds different random noise in each worker, so after it rank 0's weights are sent to
            # all workers.
            self._updater.apply(updates, 1.0 / self.loss_scale, reduced=kvstore is not None)
            stores.share_drawn(kvstore, self._optimizer, self._weights_by_key)

        if updates:
            self.scaled_step.losses = self.get_outputs(merge_multi_context=True)
            self.scaled_step.run(
                [update.gradient for update in updates],
                apply,
                self.core.statistics,
                exposed=exposed_pairs(updates),
                again=self.last_step_skipped and self.scaled_step.ledger.is_used_up,
            )
            # An update without another backward applies them again, as in MXNet.
            self.scaled_step.continue_sums(update.grad for update in updates)

    def get_input_grads(self, merge_multi_context: bool = True) -> list:
        """Return the gradients of the inputs from the last ``backward``, divided by the loss scale, as new arrays.

        ``bind`` must have been called with ``inputs_need_grad=True``. The result has the form of
        ``mx.mod.Module.get_input_grads``: a list with an array per input; with ``merge_multi_context=False``, a list
        per input, with an array per device. None stands for a gradient that was not requested by ``grad_req``.

        Waits for the device, unless the loss scale is 1, since no ``update`` checks these gradients: if one has an inf
        or NaN, a warning is logged, and the loss scale is lower from the next backward on, so that a later call is
        right.
        """
        ledger = self.scaled_step.ledger
        factor = 1.0 / ledger.scale
        arrays = []

        def unscaled(found: Any) -> Any:
            if isinstance(found, list):
                return [unscaled(each) for each in found]
            if found is None:
                return None
            arrays.append(Gradient("input", found * factor))
            return arrays[-1].array

        result = unscaled(super().get_input_grads(merge_multi_context))
        if factor != 1.0 and non_finite(arrays):
            self.scaled_step.note_input_overflow()
        return result

    def discard(self) -> None:
        """Leave this step out: drop the gradients of the parameters, instead of ``update``.

        They become zero. Weights, counters and schedules stay as they are, and so does the loss scale, unless a
        gradient of a parameter or an input has an inf or NaN: then it falls, as after a skipped step. Running
        statistics that are not finite go back to their last finite values. With several workers, all must discard.
        Waits for the device.
        Raises ``RuntimeError`` if the module is not bound or initialized, or was bound with ``for_training=False``.
        """
        require(self, optimizer=False)
        self._require_gradients()
        group = self._exec_group
        if self.has_other_workers:
            self._sum_gradients()  # all find the same overflows
        named = [*zip(group.param_names, group.grad_arrays)]
        inputs = [*zip(self._data_names, group.input_grad_arrays)] if self.inputs_need_grad else []
        found = [Gradient(name, array) for name, arrays in [*named, *inputs] for array in arrays if array is not None]
        if self.scaled_step.ledger.scaled:
            self.scaled_step.discard(found, self.core.statistics)
        for gradient in found[: sum(len(arrays) for _, arrays in named if arrays[0] is not None)]:
            gradient.array[:] = 0
        self._params_dirty = True  # the forward has moved running statistics

    def _require_gradients(self) -> None:
        if not self.for_training:
            raise RuntimeError("there are no gradients: call bind(..., for_training=True, force_rebind=True) first")

    def _sum_gradients(self) -> list[Update]:
        """Sum the gradients over devices and workers, if there is a kvstore; return them for the optimizer."""
        group, kvstore, updates = self._exec_group, self._kvstore, []
        for name, weights, gradients in zip(group.param_names, group.param_arrays, group.grad_arrays):
            if gradients[0] is None:
                continue
            index = self._updater.numbers[name]
            if kvstore is not None:
                kvstore.pushpull(name, gradients, priority=-index)
            masters = self.core.masters.get(name)
            updates += [Update(index, k, name, w, g, masters) for k, (w, g) in enumerate(zip(weights, gradients))]
        return updates

    @property
    def scaled_step(self) -> ScaledStep:
        """Return the ``ScaledStep``, which applies or skips updates and keeps loss scale and counters of steps."""
        return self.core.step

    # -- files --------------------------------------------------------------------------------------

    def save_checkpoint(
        self, prefix: str, epoch: int, save_optimizer_states: bool = False, remove_amp_cast: bool = True
    ) -> None:
        """Save the FP32 Symbol and the FP32 parameters in files that ``mx.mod.Module.load`` opens without mxmp.

        The files are ``PREFIX-symbol.json``, ``PREFIX-0001.params`` for epoch 1, and, if ``save_optimizer_states``,
        ``PREFIX-0001.states``, which only mxmp reads. Each appears completely or not at all. ``remove_amp_cast`` leaves
        out ``amp_cast`` operators that the user's own Symbol has. Waits for the device. Raises ``OSError``, which names
        the file, if one cannot be written. Raises ``RuntimeError``, and writes nothing, before ``init_params``, or for
        states before ``init_optimizer``.
        """
        if not self.params_initialized:
            raise RuntimeError("call init_params() first: there are no parameters to save")
        if save_optimizer_states:
            require(self, optimizer=True)
        with replacing(f"{prefix}-symbol.json") as path:
            write_symbol(path, self._symbol, remove_amp_cast)
        self.save_params(f"{prefix}-{epoch:04d}.params")
        if save_optimizer_states:
            self.save_optimizer_states(f"{prefix}-{epoch:04d}.states")
        self.logger.info("Saved checkpoint %s-%04d", prefix, epoch)

    def save_optimizer_states(self, fname: str) -> None:
        """Save optimizer states, master weights, the loss scale and the counters of steps in one file.

        A run on one device continues bit for bit from this file and the parameters of ``save_checkpoint``. The file
        appears completely or not at all. Waits for the device. Raises ``RuntimeError`` before ``init_optimizer``,
        ``OSError`` if the file cannot be written.
        """
        require(self, optimizer=True)
        from ..step import states

        states.save(fname, self.scaled_step, self._updater, self._weights_of_optimizer())

    def load_optimizer_states(self, fname: str) -> None:
        """Load a file of ``save_optimizer_states``, or of the same method of ``mx.mod.Module``.

        The number of devices may differ from that of the saved run. Optimizer states and update counts (Adam's ``t``),
        master weights (of parameters that both runs store in float16), counters of steps and the loss scale (for a
        scaler of the same class) are set to those of the file; MXNet's file has optimizer states only. The learning
        rate, its schedule, the weight decay and the other arguments of the optimizer stay those that ``init_optimizer``
        got, as in MXNet. A schedule with the same settings as the saved one continues where that one ended; any other
        starts at the next update, as in a new run. A warning is logged if the parameters, now or at the next update,
        are those of another step than the file's.

        Raises
        ------
        RuntimeError
            ``bind``, ``init_params`` or ``init_optimizer`` was not called.
        ValueError
            The file is damaged, or is of other parameters (other shapes, or names that differ in more than numbers), of
            another optimizer, or of the same one with other states, as SGD has with and without momentum. Nothing has
            changed.
        OSError
            The file cannot be read.
        """
        self._read_states(fname)
        self._params_dirty = True

    def check_optimizer_states(self, fname: str) -> None:
        """Raise the errors of ``load_optimizer_states`` for a file that it cannot load; change nothing."""
        self._read_states(fname, only_check=True)

    def _read_states(self, fname: str, *, only_check: bool = False) -> None:
        from ..step import states

        require(self, optimizer=True)
        states.load(
            fname,
            self.scaled_step,
            self._updater,
            self._weights_of_optimizer,
            self._context,
            settings="caller",
            names_identify=True,
            only_check=only_check,
        )


def _check_names(given: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``data_names`` or ``label_names`` is one string, of which MXNet takes every letter."""
    for which in ("data_names", "label_names"):
        names = given.get(which)
        if isinstance(names, str) and len(names) > 1:
            raise ValueError(f"{which} must be a list of names, got {names!r}: write [{names!r}]")


def _check_values(
    given: Mapping[str, NDArray] | None, held: Mapping[str, NDArray], *, missing: bool, extra: bool
) -> None:
    """Raise an error unless ``given`` values fit the arrays to set, ``held``, before any of them is set."""
    if given is None:
        return
    absent = [name for name in held if name not in given]
    if absent and not missing:
        raise RuntimeError(f"{', '.join(absent[:5])} is not presented: pass its value, or allow_missing=True")
    unknown = [name for name in given if name not in held]
    if unknown and not extra:
        raise ValueError(f"the Symbol has no {', '.join(unknown[:5])}: leave it out, or pass allow_extra=True")
    for name in given.keys() & held.keys():
        if given[name].shape != held[name].shape:
            raise ValueError(f"{name} has shape {given[name].shape}, expected {held[name].shape}")


def require(module: mx.mod.BaseModule, *, optimizer: bool) -> None:
    """Raise ``RuntimeError``, which names the methods to call first, unless ``module`` is ready."""
    done = {
        "bind": module.binded,
        "init_params": module.params_initialized,
        "init_optimizer": module.optimizer_initialized or not optimizer,
    }
    missing = [f"{name}()" for name, so in done.items() if not so]
    if missing:
        raise RuntimeError(
            f"call {' and '.join(filter(None, (', '.join(missing[:-1]), missing[-1])))} first, as fit() does"
        )


def _inputs(descs: Sequence[Any], contexts: Sequence[mx.Context]) -> Inputs:
    on_gpu = any(device_of(ctx) == "gpu" for ctx in contexts)
    return Inputs(
        shapes={desc[0]: tuple(desc[1]) for desc in descs},
        dtypes={desc.name: desc.dtype for desc in descs if isinstance(desc, mx.io.DataDesc)},
        parts=_parts_of_batch(descs, len(contexts)) if on_gpu else None,
    )


def _parts_of_batch(inputs: Sequence[Any], devices: int) -> dict[str, tuple]:
    """Return the shapes, by name, of data and labels on one of the devices among which MXNet divides a batch."""
    found = {}
    for desc in inputs:
        name, shape = desc[0], list(desc[1])
        axis = mx.io.DataDesc.get_batch_axis(getattr(desc, "layout", None))  # -1: the layout has no batch
        if 0 <= axis < len(shape):
            shape[axis] //= devices
        found[name] = tuple(shape)
    return found
