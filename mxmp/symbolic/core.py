"""The state that the modules of all buckets share: how parameters are stored, master weights, loss-scaled steps."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Callable, Collection, Iterable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from ..frontend import Listeners
from ..pipeline import Conversion
from ..policy import Policy
from ..precision.casts import declare_full
from ..precision.graph import TYPE_CODES, Graph
from ..precision.heads import SCALE_NAME, scale_heads
from ..precision.plan import Plan, read_policy
from ..step.masters import MasterPair, Weight, assign, take_over
from ..step.scaler import NoLossScaler, as_scaler
from ..step.statistics import RunningStatistics
from ..step.step import ScaledStep
from ..step.updater import Updaters
from .cast import message_if_nothing_low, warn_of_unmatched


class Core:
    """The state of mixed precision that modules share: the conversion, the master weights, and the loss-scaled step.

    Every ``Module`` makes a Core from its arguments ``policy``, ``exclude`` and ``loss_scale``. A module that is bound
    with ``shared_module`` uses the Core of that module instead, and the modules of a ``BucketingModule`` share one. The
    argument ``arrays`` of the methods maps each parameter's name to its arrays in a module's executors, one per device.
    If the module is that of a bucket, parameters that the default bucket has may be missing.

    Attributes
    ----------
    step : ScaledStep
        Checks gradients and applies or skips the update; has the scaler, which decides the loss scale, and the
        counters of steps.
    scaled_by : float
        The loss scale of the last backward, by which the gradients in the executors are multiplied; 1 before the first.
    conversion : Conversion
        The policy or plan, and whether each parameter is stored in float16 or FP32.
    masters : dict of str to list of NDArray
        From the name of each parameter that is stored in float16 to its master weights, one FP32 array per device.
        Empty before ``make_masters``.
    statistics : RunningStatistics
        Keeps finite copies of BatchNorm's running statistics, to restore them after an overflow.
    listening_executors : weak mapping of Executor to (Listeners, Executor)
        From each executor that reports tensors to ``watch``, ``blame`` or ``guard`` to a pair: the callback that gets
        the tensors, and the fast executor, without a callback, that it stands in for.
    exposed : bool
        True once a user has accessed a module's executors, and so may have written into their arrays.
    shared : bool
        True once a module was bound with ``shared_module``, so that modules may share arrays.
    trains : bool
        True once a module was bound for training, so that parameters may change at any update.
    inference_graphs : weak set of InferenceGraph
        Those of all modules with this core. They have copies of the parameters, which the modules may share.
    modules : list of Module
        The modules with this core that were bound and still exist, in the order of their first ``bind``.
    """

    def __init__(self, policy: str | Policy | Plan, exclude: Iterable[str], loss_scale: Any) -> None:
        requested, plan = read_policy(policy, exclude)
        self.step = ScaledStep(as_scaler(loss_scale, only_bfloat16=requested.compute == "bfloat16"))
        self.conversion = Conversion(plan or requested)
        self.scaled_by = 1.0
        self.masters: dict[str, list[NDArray]] = {}
        self.statistics = RunningStatistics()
        self.exposed = False
        self.shared = False
        self.trains = False
        self.inference_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.listening_executors: weakref.WeakKeyDictionary[
            mx.executor.Executor, tuple[Listeners, mx.executor.Executor]
        ]
        self.listening_executors = weakref.WeakKeyDictionary()
        self._modules: list[weakref.ref[Any]] = []
        self._warned = False

    @property
    def modules(self) -> list[Any]:
        return [module for each in self._modules if (module := each()) is not None]

    def add_module(self, module: Any) -> None:
        """Add ``module``, which has just been bound, to ``modules``; do nothing if it is there already."""
        if not any(each is module for each in self.modules):
            self._modules = [*map(weakref.ref, self.modules), weakref.ref(module)]

    @property
    def low_names(self) -> set[str]:
        """Return the names of the parameters that are stored in float16; empty before the first ``bind``."""
        return {name for name, low in self.conversion.stored_low.items() if low}

    def low_symbol(
        self,
        symbol: mx.sym.Symbol,
        device: str,
        parameters: Collection[str],
        for_training: bool,
        grad_req: Mapping[str, str],
        shapes: Mapping[str, tuple],
        dtypes: Mapping[str, Any],
        gpu_shapes: Mapping[str, tuple] | None,
    ) -> tuple[mx.sym.Symbol, Plan]:
        """Return the Symbol with casts that executors are to run for an FP32 Symbol, and the plan that it follows.

        The first call decides which parameters are stored in float16, and later calls, for other buckets, follow it.
        After ``conversion.exclude``, by which ``guard`` moves operators to FP32, the next call decides anew. The very
        first call also warns if no operator computes in low precision, or if a pattern of ``exclude`` matches nothing.

        ``device`` is ``"cpu"`` or ``"gpu"``. ``parameters`` are the names of the Symbol's parameters. ``grad_req`` maps
        them, data and labels to ``"write"``, ``"add"`` or ``"null"``. It is empty if the requests are not known: the
        Symbol gets each workaround that one of the three requests would need. ``shapes`` and ``dtypes`` are those of
        data and labels, by name; ``gpu_shapes`` are the shapes of their parts on one device, or None if no executor is
        for a GPU. If ``for_training`` is True, the Symbol has loss heads and the scaler is not a
        NoLossScaler (whose scale is always 1), the result has one more argument, ``heads.SCALE_NAME``, which multiplies
        the gradients of loss heads.

        Raises ``ValueError`` if the policy needs what the device lacks (bfloat16 on a GPU), an operator has no rule, a
        Plan is of another device, or the Symbol has an input with the name of the loss scale. A call that decides also
        raises it if the Plan is of another Symbol; any other call does so only if the Plan has no operator of this
        Symbol.
        """
        if SCALE_NAME in symbol.list_inputs():
            raise ValueError(f"the Symbol has an input {SCALE_NAME!r}, the name of mxmp's own: give it another name")
        stored = self.conversion.stored_low
        graph, plan = self.conversion.build(
            symbol,
            device,
            parameters,
            # All buckets share the master weights, so the first graph decides how parameters are stored.
            stored={name: stored.get(name, False) for name in parameters} if stored else {},
            keep_output_names=True,
            grad_req=grad_req,
            strict=not stored,
            training_shapes=shapes if for_training else {},
        )
        if not self._warned:
            self._warned = True
            warn_of_unmatched(plan, stacklevel=4)
            useless = message_if_nothing_low(plan)
            if useless:
                warnings.warn(useless, stacklevel=3)
        if for_training and type(self.step.scaler) is not NoLossScaler:  # ten operators on the logits
            scale_heads(graph, dtypes)
        declare_full(graph, {name: dtypes.get(name, np.float32) for name in shapes})
        if gpu_shapes is not None:
            _declare_parameters(graph, symbol, parameters, gpu_shapes, dtypes)
        return graph.to_symbol(), plan

    def forget_copies(self) -> None:
        """Let all ``inference_graphs`` take their parameters anew, since those of a module have changed."""
        for graph in self.inference_graphs:
            graph.forget()

    def make_masters(self, values: Mapping[str, NDArray], arrays: Mapping[str, Sequence[NDArray]]) -> None:
        """Create the master weights of all parameters in ``arrays`` that are stored in float16.

        ``values`` maps the name of every parameter to its FP32 value. Parameters that are not in ``arrays``, which
        another module has, keep their master weights while they are stored in float16.
        """
        kept = {name: masters for name, masters in self.masters.items() if name in self.low_names}
        made = {
            name: [values[name].as_in_context(array.ctx).astype("float32") for array in copies]
            for name, copies in arrays.items()
            if name in self.low_names
        }
        self.masters = {**kept, **made}

    def master(self, device: int, name: str) -> NDArray | None:
        """Return a parameter's master weight on device number ``device``; None if the parameter is stored in FP32."""
        masters = self.masters.get(name)
        return None if masters is None else masters[device]

    def exposed_pairs(self, arrays: Mapping[str, Sequence[NDArray]]) -> list[MasterPair]:
        """Return a pair per device for each parameter in ``arrays`` that has master weights; [] unless ``exposed``.

        A pair is a master weight and its float16 array. A user who has accessed the executors may have written into the
        float16 array. The caller compares the two, and copies what was written into the master weight.
        """
        names = self.masters.keys() & arrays.keys() if self.exposed else ()
        return [MasterPair(*pair) for name in names for pair in zip(self.masters[name], arrays[name])]

    def set_masters(self, values: Mapping[str, NDArray], arrays: Mapping[str, Sequence[NDArray]]) -> None:
        """Set master weights on all devices to FP32 values, and round them into the float16 arrays.

        ``values`` has one array per parameter, by name. Names of parameters without a master weight are skipped.
        """
        for name in self.masters.keys() & values.keys():
            assign(values[name], self.masters[name], arrays[name])

    def mean_masters(self, arrays: Mapping[str, Sequence[NDArray]]) -> dict[str, NDArray]:
        """Return the mean over the devices of each master weight, as an FP32 array on the CPU, by parameter name.

        For its CPU copies of parameters that are stored in FP32, ``mx.mod.Module`` itself takes the same mean.
        """
        held = {weight.name: weight.masters for weight in self.weights(arrays) if weight.masters}
        return {k: mx.nd.add_n(*(m.as_in_context(mx.cpu()) for m in v)) / len(v) for k, v in held.items()}

    def weights(self, arrays: Mapping[str, Sequence[NDArray]]) -> list[Weight]:
        """Return a ``Weight`` for each parameter in ``arrays``, in their order.

        What a user has written into float16 arrays is copied into the master weights first.
        """
        for pair in self.exposed_pairs(arrays):
            take_over(*pair)

        def weight(name: str, copies: Sequence[NDArray]) -> Weight:
            masters = self.masters.get(name)
            return Weight(name, copies[0].shape, copies, masters, lambda value: assign(value, masters or (), copies))

        return [weight(name, copies) for name, copies in arrays.items()]


class NamedUpdaters(Updaters):
    """The Updaters of a Module's optimizer, which numbers the parameters that it updates.

    Modules that borrow the optimizer, such as those of other buckets, use these numbers, whatever their own order of
    parameters. Modules with one Core may each have an optimizer of its own, with its own numbers.

    Attributes
    ----------
    core : Core
        Has the master weights.
    names : list of str
        The names of the parameters. A parameter's position is its index in the optimizer, on all workers.
    numbers : dict of str to int
        From the name of each parameter to its position in ``names``.
    """

    def __init__(self, optimizer: mx.optimizer.Optimizer, num_devices: int, core: Core, names: Iterable[str]) -> None:
        self.core = core
        self.names = list(names)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        super().__init__(optimizer, num_devices, self._master)

    def _master(self, device: int, index: int) -> NDArray | None:
        """Return the master weight of parameter number ``index`` on device number ``device``, or None."""
        return self.core.master(device, self.names[index])


def _declare_parameters(
    graph: Graph, symbol: mx.sym.Symbol, names: Collection[str], shapes: Mapping[str, tuple], dtypes: Mapping[str, Any]
) -> None:
    """Declare, in place, the shapes of parameters that MXNet infers for the FP32 ``symbol``, and which are FP32.

    For a GPU, MXNet fuses pointwise operators before it infers shapes and dtypes, and infers neither for what a fused
    operator reads. One pointwise operator between a weight and the operator that reads it is not fused, but it and a
    cast are, so that ``bind`` would fail. A dtype that is declared already stays. ``names`` are the parameters;
    ``shapes`` and ``dtypes`` are those of data and labels, by name. A dtype that is missing is FP32.
    """
    given = {name: dtypes.get(name, np.float32) for name in shapes}
    found_shapes = _inferred(symbol, symbol.infer_shape_partial, shapes)
    found_dtypes = _inferred(symbol, symbol.infer_type_partial, given)
    for node in graph.nodes():
        if node.is_variable and node.name in names:
            shape = found_shapes.get(node.name)
            if shape and min(shape) > 0:  # otherwise it is not known
                node.attrs["__shape__"] = str(tuple(shape))
            if found_dtypes.get(node.name) is np.float32:
                node.attrs.setdefault("__dtype__", TYPE_CODES["float32"])


def _inferred(symbol: mx.sym.Symbol, infer: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the method ``infer`` of ``symbol`` finds for the arguments, by name, from what is given for some.

    The result is empty if MXNet finds a contradiction. It may be none in the graph with casts, as if data are float16
    and labels FP32; otherwise ``bind`` says what it is.
    """
    try:
        return dict(zip(symbol.list_arguments(), infer(**given)[0] or ()))
    except mx.MXNetError:
        return {}
