"""What the modules of all buckets share: how parameters are stored, their FP32 masters, and the scaled step."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Collection, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..conversion import Conversion
from ..frontend import Listeners
from ..kernels.fit import UNKNOWN
from ..policy import Policy
from ..precision.casts import declare_full
from ..precision.heads import scale_heads
from ..precision.plan import Plan
from ..step._mxnet import is_asked_by_user
from ..step.masters import Weight, assign, take_over
from ..step.step import ScaledStep
from .cast import nothing_low, warn_of_unmatched

__all__ = ["Core", "LendsArrays", "grad_requests"]


class Core:
    """The state that all buckets share.

    Attributes
    ----------
    step : ScaledStep
    scaled_by : float
        Loss scale of the last backward.
    conversion : Conversion
    masters : dict of str to list of NDArray
        Their FP32 values, one per device; empty before ``make_masters``.
    names : list of str
        All parameters, in the order of their numbers.
    numbers : dict of str to int
        The inverse; a bucket may have them in another order.
    twins : mapping of Executor to (Listeners, Executor)
        Executors that call listeners, each with these and the executor in whose place it stands.
    lent : bool
        Whether someone has asked for arrays that compute, and may have written into them.
    """

    def __init__(self, step: ScaledStep, conversion: Conversion) -> None:
        self.step = step
        self.conversion = conversion
        self.scaled_by = 1.0
        self.masters: dict[str, list[NDArray]] = {}
        self.names: list[str] = []
        self.numbers: dict[str, int] = {}
        self.lent = False
        self.twins: weakref.WeakKeyDictionary[mx.executor.Executor, tuple[Listeners, mx.executor.Executor]]
        self.twins = weakref.WeakKeyDictionary()
        self._warned = False

    @property
    def low_names(self) -> set[str]:
        """Parameters that are stored low."""
        return {name for name, low in self.conversion.stored_low.items() if low}

    def low_symbol(
        self,
        symbol: mx.sym.Symbol,
        device: str,
        parameters: Collection[str],
        for_training: bool,
        grad_req: Mapping[str, str],
    ) -> tuple[mx.sym.Symbol, Plan]:
        """Return what executors run and its plan: the graph with casts and, for training, the scale at loss heads.

        Warns where nothing computes low, or a pattern of ``exclude`` matches nothing.
        """
        stored = self.conversion.stored_low
        graph, plan = self.conversion.build(
            symbol,
            device,
            parameters,
            # Masters are made once, so the first graph decides for all.
            stored={name: stored.get(name, False) for name in parameters} if stored else {},
            keep_output_names=True,
            grad_req=grad_req,
            whole=not stored,
        )
        if not self._warned:
            self._warned = True
            warn_of_unmatched(plan, stacklevel=4)
            useless = nothing_low(plan)
            if useless:
                warnings.warn(useless, stacklevel=3)
        if for_training:
            scale_heads(graph)
        declare_full(graph)
        return graph.to_symbol(), plan

    def decide_anew(self, how: Policy | Plan) -> None:
        """Bind by another policy or plan, whose first graph decides again how parameters are stored."""
        self.conversion.how = how
        self.conversion.stored_low.clear()

    def make_masters(self, values: Mapping[str, NDArray], arrays: Mapping[str, Sequence[NDArray]]) -> None:
        """FP32 masters beside ``arrays``, in one order on all workers, who number their keys by it."""
        self.names = list(arrays)
        self.numbers = {name: number for number, name in enumerate(arrays)}
        self.masters = {
            name: [values[name].as_in_context(array.ctx).copy() for array in copies]
            for name, copies in arrays.items()
            if name in self.low_names
        }

    def master(self, index: int, device: int, array: NDArray) -> NDArray | None:
        """The master of parameter number ``index``, which computes as ``array`` on a device; None where it has none."""
        masters = self.masters.get(self.names[index])
        if masters is None:
            return None
        if self.lent:
            take_over(masters[device], array)
        return masters[device]

    def set_masters(self, values: Mapping[str, NDArray], arrays: Mapping[str, Sequence[NDArray]]) -> None:
        """FP32 values for those that are named in ``values``."""
        for name in self.masters.keys() & values.keys():
            assign(values[name], self.masters[name], arrays[name])

    def values(self, arrays: Mapping[str, Sequence[NDArray]]) -> dict[str, NDArray]:
        """FP32 values of those that have masters: the devices' mean, as MXNet's Module takes it."""
        held = {weight.name: weight.masters for weight in self.weights(arrays) if weight.masters}
        return {k: mx.nd.add_n(*(m.as_in_context(mx.cpu()) for m in v)) / len(v) for k, v in held.items()}

    def weights(self, arrays: Mapping[str, Sequence[NDArray]]) -> list[Weight]:
        """All parameters, in the order of their numbers; what was written into ``arrays`` holds."""

        def weight(name: str) -> Weight:
            copies, masters = arrays[name], self.masters.get(name)
            for master, array in zip(masters or (), copies) if self.lent else ():
                take_over(master, array)
            return Weight(name, copies[0].shape, copies, masters, lambda value: assign(value, masters or (), copies))

        return [weight(name) for name in self.names]


class LendsArrays:
    """Notes when a user reaches for the executors' arrays, to write into them; there is no public way to them."""

    core: Core

    @property
    def _exec_group(self) -> Any:
        if is_asked_by_user():
            self.core.lent = True
        return self._group

    @_exec_group.setter
    def _exec_group(self, group: Any) -> None:
        self._group = group


def grad_requests(grad_req: Any, params: Collection[str], fixed: Collection[str]) -> Mapping[str, str]:
    """What ``bind(grad_req=...)`` asks of the gradient of each parameter; empty where it says so one by one."""
    if not isinstance(grad_req, str):
        return UNKNOWN
    return {name: "null" if name in fixed else grad_req for name in params}
