"""The state that the modules of all buckets share: how parameters are stored, their masters, and the scaled step."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Collection, Iterable, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..frontend import Listeners
from ..pipeline import Conversion
from ..policy import Policy
from ..precision.casts import declare_full
from ..precision.heads import scale_heads
from ..precision.plan import Plan, read_policy
from ..step.masters import MasterPair, Weight, assign, take_over
from ..step.scaler import as_scaler
from ..step.step import ScaledStep
from .cast import nothing_low, warn_of_unmatched

__all__ = ["Core"]


class Core:
    """The state that all buckets share, by what ``policy``, ``exclude`` and ``loss_scale`` of a module may be.

    Attributes
    ----------
    step : ScaledStep
    scaled_by : float
        Loss scale of the last backward.
    conversion : Conversion
    masters : dict of str to list of NDArray
        FP32 values of the parameters that are stored in low precision, one per device; empty before ``make_masters``.
    numbers : dict of str to int
        The number of each parameter by its name; a bucket may have them in another order.
    twins : mapping of Executor to (Listeners, Executor)
        Executors that call listeners, each with these and the executor that it replaces.
    exposed : bool
        Whether a user has read the arrays that compute, and may have written into them.
    """

    def __init__(self, policy: str | Policy | Plan, exclude: Iterable[str], loss_scale: Any) -> None:
        requested, plan = read_policy(policy, exclude)
        self.step = ScaledStep(as_scaler(loss_scale, only_bfloat16=requested.compute == "bfloat16"))
        self.conversion = Conversion(plan or requested)
        self.scaled_by = 1.0
        self.masters: dict[str, list[NDArray]] = {}
        self.numbers: dict[str, int] = {}
        self.exposed = False
        self.twins: weakref.WeakKeyDictionary[mx.executor.Executor, tuple[Listeners, mx.executor.Executor]]
        self.twins = weakref.WeakKeyDictionary()
        self._names: list[str] = []
        self._warned = False

    @property
    def low_names(self) -> set[str]:
        """Return the names of the parameters that are stored in low precision."""
        return {name for name, low in self.conversion.stored_low.items() if low}

    def low_symbol(
        self,
        symbol: mx.sym.Symbol,
        device: str,
        parameters: Collection[str],
        for_training: bool,
        grad_req: Mapping[str, str],
    ) -> tuple[mx.sym.Symbol, Plan]:
        """Return the Symbol that executors run, with casts and, for training, the scale at loss heads; and its plan.

        Warns where nothing computes in low precision, or a pattern of ``exclude`` matches nothing.
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
            strict=not stored,
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

    def make_masters(self, values: Mapping[str, NDArray], arrays: Mapping[str, Sequence[NDArray]]) -> None:
        """Make FP32 masters for ``arrays``, in an order that all workers share, who number their keys by it."""
        self._names = list(arrays)
        self.numbers = {name: number for number, name in enumerate(arrays)}
        self.masters = {
            name: [values[name].as_in_context(array.ctx).copy() for array in copies]
            for name, copies in arrays.items()
            if name in self.low_names
        }

    def master(self, index: int, device: int) -> NDArray | None:
        """Return the master of parameter number ``index`` on a device, None where it has none."""
        masters = self.masters.get(self._names[index])
        return None if masters is None else masters[device]

    def exposed_pairs(self, arrays: Mapping[str, Sequence[NDArray]]) -> list[MasterPair]:
        """Return each master with the array that computes, if a user may have written into those; otherwise none."""
        names = self.masters.keys() & arrays.keys() if self.exposed else ()
        return [MasterPair(*pair) for name in names for pair in zip(self.masters[name], arrays[name])]

    def set_masters(self, values: Mapping[str, NDArray], arrays: Mapping[str, Sequence[NDArray]]) -> None:
        """Set the masters of those that are named in ``values``."""
        for name in self.masters.keys() & values.keys():
            assign(values[name], self.masters[name], arrays[name])

    def values(self, arrays: Mapping[str, Sequence[NDArray]]) -> dict[str, NDArray]:
        """Return the FP32 values of those that have masters: the devices' mean, as MXNet's Module takes it."""
        held = {weight.name: weight.masters for weight in self.weights(arrays) if weight.masters}
        return {k: mx.nd.add_n(*(m.as_in_context(mx.cpu()) for m in v)) / len(v) for k, v in held.items()}

    def weights(self, arrays: Mapping[str, Sequence[NDArray]]) -> list[Weight]:
        """Return all parameters, in the order of their numbers, with what was written into ``arrays`` taken over."""
        for pair in self.exposed_pairs(arrays):
            take_over(*pair)

        def weight(name: str) -> Weight:
            copies, masters = arrays[name], self.masters.get(name)
            return Weight(name, copies[0].shape, copies, masters, lambda value: assign(value, masters or (), copies))

        return [weight(name) for name in self._names]
