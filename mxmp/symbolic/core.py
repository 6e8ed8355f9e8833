"""The state that the modules of all buckets share: how parameters are stored, master weights, loss-scaled steps."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Collection, Iterable, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from ..messages.callers import warn_user
from ..pipeline import Conversion, Use
from ..policy import Policy, is_policy_text
from ..precision.casts import declare_full, strip, widen_inputs
from ..precision.graph import TYPE_CODES, Graph, inferred
from ..precision.heads import SCALE_NAME, scale_heads
from ..precision.operators import FLOAT64, is_float64
from ..precision.plan import Plan, read_policy
from ..step.masters import Masters, Weight
from ..step.scaler import NoLossScaler, as_scaler
from ..step.statistics import RunningStatistics
from ..step.step import ScaledStep
from ..step.updater import Updaters
from .cast import message_if_nothing_low, warn_of_unmatched

if TYPE_CHECKING:
    from ..precision.monitoring import Listeners


class Inputs(NamedTuple):
    """Data and labels that a module is bound with, by name."""

    shapes: Mapping[str, tuple]
    dtypes: Mapping[str, Any]  # of those that have one
    parts: Mapping[str, tuple] | None  # the shapes on one of the devices; None without a GPU

    @property
    def non_fp32(self) -> dict[str, str]:
        """Return why inputs are cast nowhere, by name."""
        return {name: FLOAT64 for name, dtype in self.dtypes.items() if is_float64(dtype)}

    @property
    def half(self) -> set[str]:
        """Return the names of those in float16."""
        return {name for name, dtype in self.dtypes.items() if dtype is not None and np.dtype(dtype) == np.float16}


def refuse_policy_by_position(args: Iterable[Any]) -> None:
    """Raise ``ValueError`` if a policy is among the arguments by position, of which MXNet takes it for names or a
    logger."""
    for each in args:
        if isinstance(each, (Policy, Plan)) or (isinstance(each, str) and is_policy_text(each)):
            text = "plan" if isinstance(each, Plan) else repr(str(each))
            raise ValueError(f"the policy is a keyword, policy={text}")


class Core:
    """The state of mixed precision that modules share: the conversion, the master weights, and the loss-scaled step.
    All buckets, and modules bound with ``shared_module``, have one Core. ``arrays`` has the arrays of each parameter by
    name, one per device; the module of a bucket may lack some parameters."""

    def __init__(self, policy: str | Policy | Plan, exclude: Iterable[str], loss_scale: Any) -> None:
        requested, plan = read_policy(policy, exclude)
        self.step = ScaledStep(as_scaler(loss_scale, only_bfloat16=requested.compute == "bfloat16"))
        self.conversion = Conversion(plan or requested)  # the policy or plan, and how parameters are stored
        # Of each parameter that is stored in float16, by name; empty before ``make_masters``.
        self.masters: dict[str, Masters] = {}
        self.statistics = RunningStatistics()
        self.exposed = False  # True once a user has accessed executors, and may have written into arrays
        self.shared = False  # True once a module was bound with ``shared_module``, so that modules share arrays
        self.trains = False  # True once a module was bound for training, so that parameters may change
        # Those of all modules, which have copies of the parameters.
        self.inference_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        # From an executor that reports tensors to its callback, and the fast executor that it stands in for.
        self.listening_executors: weakref.WeakKeyDictionary[
            mx.executor.Executor, tuple[Listeners, mx.executor.Executor]
        ]
        self.listening_executors = weakref.WeakKeyDictionary()
        self._modules: list[weakref.ref[Any]] = []  # in the order of their first ``bind``
        self._warned = False

    @property
    def modules(self) -> list[Any]:
        return [module for each in self._modules if (module := each()) is not None]

    def add_module(self, module: Any) -> None:
        if not any(each is module for each in self.modules):
            self._modules = [*map(weakref.ref, self.modules), weakref.ref(module)]

    @property
    def low_names(self) -> set[str]:
        """Return the names of the parameters that are stored in float16; empty before the first ``bind``."""
        return {name for name, low in self.conversion.stored_low.items() if low}

    def low_symbol(
        self, symbol: mx.sym.Symbol, use: Use, inputs: Inputs, *, for_training: bool
    ) -> tuple[mx.sym.Symbol, Plan]:
        """Return the Symbol with casts that executors are to run for an FP32 Symbol, and the plan that it follows.
        The first call, and the first after ``conversion.exclude``, decides which parameters are stored in float16."""
        if SCALE_NAME in symbol.list_inputs():
            raise ValueError(f"the Symbol has an input {SCALE_NAME!r}, the name of mxmp's own: give it another name")
        # All buckets share the master weights, so the first graph decides how parameters are stored.
        known, half = self.conversion.stored_low, inputs.half
        stored = {name: known.get(name, False) for name in use.parameters} if known else {}
        graph, plan = self.conversion.build(
            Graph.from_symbol(symbol), replace(use, stored=stored, strict=not known, fits=bool(known))
        )
        if not self._warned:
            self._warned = True
            useless = message_if_nothing_low(plan)
            if useless:
                warn_user(useless)
            warn_of_unmatched(plan, self.conversion.plan is None)
        if half:
            widen_inputs(graph, half)
        if for_training and type(self.step.scaler) is not NoLossScaler:  # ten operators on the logits
            scale_heads(graph, inputs.dtypes)
        declare_full(graph, {name: inputs.dtypes.get(name, np.float32) for name in inputs.shapes})
        if inputs.parts is not None:
            _declare_parameters(graph, symbol, use.parameters, inputs.parts, inputs.dtypes)
        return graph.to_symbol(), plan

    def look_at(self, data: Mapping[str, NDArray], symbol: mx.sym.Symbol, plan: Plan) -> None:
        """Warn of data whose digits would be lost; each input of the FP32 Symbol is looked at once."""
        self.conversion.inputs.look_at(data, lambda: strip(Graph.from_symbol(symbol)), plan)

    def forget_copies(self) -> None:
        """Let all ``inference_graphs`` take their parameters anew, since those of a module have changed."""
        for graph in self.inference_graphs:
            graph.forget()

    def make_masters(self, values: Mapping[str, NDArray], arrays: Mapping[str, Sequence[NDArray]]) -> None:
        """Create the master weights of the parameters in ``arrays`` that are stored in float16, from FP32 values."""
        kept = {name: masters for name, masters in self.masters.items() if name in self.low_names}  # of other modules
        made = {
            name: Masters(
                (values[name].as_in_context(array.ctx).astype("float32") for array in copies), exposed=self.exposed
            )
            for name, copies in arrays.items()
            if name in self.low_names
        }
        self.masters = {**kept, **made}

    def expose(self) -> None:
        """Note that a user may write into the executors' arrays from now on."""
        self.exposed = True
        for masters in self.masters.values():
            masters.exposed = True

    def set_masters(self, values: Mapping[str, NDArray], arrays: Mapping[str, Sequence[NDArray]]) -> None:
        """Set master weights on all devices to FP32 ``values``, by name, and round them into the float16 ``arrays``."""
        for name in self.masters.keys() & values.keys():
            self.masters[name].assign(values[name], arrays[name])

    def mean_masters(self, arrays: Mapping[str, Sequence[NDArray]]) -> dict[str, NDArray]:
        """Return the mean over the devices of each master weight, as an FP32 array on the CPU, by parameter name."""
        # ``mx.mod.Module`` itself takes the same mean of parameters that are stored in FP32.
        return {name: self.masters[name].mean(arrays[name]) for name in self.masters.keys() & arrays.keys()}

    def weights(self, arrays: Mapping[str, Sequence[NDArray]]) -> list[Weight]:
        """Return a ``Weight`` for each parameter in ``arrays``; first take over what a user has written into these."""

        def weight(name: str, copies: Sequence[NDArray]) -> Weight:
            masters = self.masters.get(name, Masters())
            return Weight(
                name,
                copies[0].shape,
                copies,
                masters.taken_over(copies) or None,
                lambda value: masters.assign(value, copies),
            )

        return [weight(name, copies) for name, copies in arrays.items()]


class NamedUpdaters(Updaters):
    """The Updaters of a Module's optimizer, which numbers the parameters that it updates.
    Modules that borrow the optimizer use these numbers, too, whatever their own order of parameters."""

    def __init__(self, optimizer: mx.optimizer.Optimizer, num_devices: int, names: Iterable[str]) -> None:
        super().__init__(optimizer, num_devices)
        self.names = list(names)  # a parameter's position is its index, on all workers
        self.numbers = {name: number for number, name in enumerate(self.names)}


def _declare_parameters(
    graph: Graph, symbol: mx.sym.Symbol, names: Collection[str], shapes: Mapping[str, tuple], dtypes: Mapping[str, Any]
) -> None:
    """Declare, in place, the shapes of parameters that MXNet infers for the FP32 ``symbol``, and which are FP32."""
    # For a GPU, MXNet fuses pointwise operators before it infers shapes and dtypes, and infers neither for what a fused
    # operator reads. One pointwise operator between a weight and its reader is not fused, but it and a cast are, so
    # that ``bind`` would fail.
    given = {name: dtypes.get(name, np.float32) for name in shapes}
    found_shapes, found_dtypes = {}, {}
    # The graph with casts may have no contradiction, as if data are float16 and labels FP32; otherwise ``bind`` raises.
    with suppress(mx.MXNetError):
        found_shapes = inferred(symbol, symbol.infer_shape_partial, shapes)
    with suppress(mx.MXNetError):
        found_dtypes = inferred(symbol, symbol.infer_type_partial, given)
    for node in graph.nodes():
        if node.is_variable and node.name in names:
            shape = found_shapes.get(node.name)
            if shape and min(shape) > 0:  # otherwise it is not known
                node.attrs["__shape__"] = str(tuple(shape))
            if found_dtypes.get(node.name) is np.float32:
                node.attrs.setdefault("__dtype__", TYPE_CODES["float32"])
