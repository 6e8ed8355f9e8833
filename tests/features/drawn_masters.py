"""Drawn sequences on float16 parameters with FP32 masters, and on FP32 parameters with casts, which MXNet's own trains.

The twin computes in float16 too, and scales its losses by hand. Its gradients are divided by the scale in FP32, after
they were rounded to float16 wherever the masters' are: after each backward, and after a sum over devices.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, ClassVar, Collection, Iterable

import mxnet as mx
import numpy as np
from kit.nets import CASTS
from kit.twins import MASTERS, array, value
from mxnet import autograd

from .drawn_modules import ModulePair, ModuleSide
from .drawn_sequences import BATCH, GluonPair, Plain, Side, same


def last_bit(array: mx.nd.NDArray) -> None:
    values = array.asnumpy()
    values[0, 1] = np.nextafter(values[0, 1], np.float16(10))
    array[:] = mx.nd.array(values, dtype="float16")


def keep_the_sum(array: mx.nd.NDArray) -> None:
    array[0, 0] += 0.25
    array[0, 1] -= 0.25


def by_an_operator(array: mx.nd.NDArray) -> None:
    mx.nd.sgd_update(array, array, lr=0.5, out=array)


def through_a_view(array: mx.nd.NDArray) -> None:
    array.reshape((-1,))[2:3] = 7


def behind_mxnets_back(array: mx.nd.NDArray) -> None:
    array.wait_to_read()
    mx.nd.from_dlpack(mx.nd.to_dlpack_for_write(array))[0, 2] = 0.125
    mx.nd.waitall()


def rotate(array: mx.nd.NDArray) -> None:
    array[:] = mx.nd.concat(array[1:], array[:1], dim=0)


def set_all(array: mx.nd.NDArray) -> None:
    array[:] = 3


def round_all(array: mx.nd.NDArray) -> None:
    array[:] = mx.nd.round(array * 4) / 4


def to_infinity(array: mx.nd.NDArray) -> None:
    array[1, 2] = np.inf


# What a user may write into a float16 array that computes.
WRITES = {
    write.__name__: write
    for write in (
        *(last_bit, keep_the_sum, by_an_operator, through_a_view, behind_mxnets_back),
        *(rotate, set_all, round_all, to_infinity),
    )
}
# How a user may keep weights, to put them back.
KEEP = {
    "a copy": lambda array: array.copy(),
    "float32": lambda array: array.astype("float32"),
    "through NumPy": lambda array: mx.nd.array(array.asnumpy()),
    "NumPy": lambda array: array.asnumpy(),
}


def written(full: mx.nd.NDArray, write: Any) -> mx.nd.NDArray:
    """``full`` with each element whose rounded value ``write`` changes."""
    before = full.astype("float16")
    after = before.copy()
    write(after)
    return mx.nd.where(before == after, full, after.astype("float32"))


def round_all_of(grads: list[mx.nd.NDArray]) -> None:
    for grad in grads:
        grad[:] = grad.astype("float16").astype("float32")


def add_on_the_first(groups: Iterable[list[mx.nd.NDArray]]) -> None:
    """In place of a sum over devices, which is in float16 beside it: the others become zero."""
    for first, *others in groups:
        for other in others:
            first += other.as_in_context(first.ctx)
            other[:] = 0


def are_equal(groups: Iterable[list[mx.nd.NDArray]]) -> bool:
    """Whether the devices have the same weights."""
    return all(np.array_equal(arrays[0].asnumpy(), each.asnumpy()) for arrays in groups for each in arrays[1:])


class CastTwin(Side):
    """A net with FP32 parameters, whose losses are scaled by hand; those of ``halves`` are float16 beside it."""

    halves: Collection[str] = ()

    def backward(self, losses: list[mx.nd.NDArray], scale: float, **kwargs: Any) -> None:
        self._rescale(scale)
        self._round()
        autograd.backward(losses, [mx.nd.ones_like(loss) * scale for loss in losses], **kwargs)
        self._round()
        self._rescale(1 / scale)

    def autograd_grad(self, losses: list[mx.nd.NDArray], scale: float) -> list[np.ndarray]:
        heads = [mx.nd.ones_like(loss) * scale for loss in losses]
        found = autograd.grad(losses, [weight for weight, _ in self.pairs()], head_grads=heads)
        return [grad.asnumpy() / np.float32(scale) for grad in found]

    def reduce(self, scale: float) -> None:
        if len(self.devices) > 1 and self.trainer._kvstore_params["kvstore"] is not None:
            self._rescale(scale)
            add_on_the_first(param.list_grad() for param in self._halves())
            self._round()
            self._rescale(1 / scale)
        super().reduce(scale)

    def _halves(self) -> list[mx.gluon.Parameter]:
        return [param for param in self.requested() if param.name in self.halves]

    def _rescale(self, factor: float) -> None:
        for param in self.requested():
            for grad in param.list_grad():
                grad *= factor

    def _round(self) -> None:
        for param in self._halves():
            round_all_of(param.list_grad())


STORED = {
    "masters": (MASTERS, CASTS),
    "the last": (replace(MASTERS, exclude=("first*",)), replace(CASTS, exclude=("first*",))),
    "the first": (replace(MASTERS, exclude=("last*",)), replace(CASTS, exclude=("last*",))),
    "casts": (CASTS, CASTS),
}


class MastersPair(GluonPair):
    """What a sequence of calls does to a net whose parameters are stored in float16, and to its twin."""

    OPS = (*(op for op in GluonPair.OPS if op != "edit_weights"), "user_write", "user_write", "average", "average")

    def policies_of(self) -> tuple:
        return STORED[self.draw("stored", "masters", *STORED)]

    def make(self) -> None:
        (low, full), draws = self.policies, self.draws_of_a_side
        self.low = Side(draws(), low, True, self.devices, heads=False)
        self.full = CastTwin(draws(), full, False, self.devices, heads=False)
        for side in (self.low, self.full):
            side.outputs()
            for trainer in filter(None, (side.trainer, side.other, side.plain)):
                trainer.allreduce_grads()  # the first time, the kvstore sends the first device's weights to the others
        self.full.halves = {param.name for param in self.low.trained if hasattr(param, "masters")}
        assert bool(self.full.halves) == (low.params == "float16")

    def end(self) -> None:
        """Besides: what computes is the rounded master, and states are FP32."""
        super().end()
        for param in self.low.trained:
            if param.name in self.full.halves:
                rounded = [master.astype("float16").asnumpy() for master in param.masters()]
                same([array.asnumpy() for array in param.list_data()], rounded, "what computes")

    def run(self, op: str) -> None:
        """Files of devices that differ have the mean of the weights and the first one's masters."""
        if op != "load_states" or not self._devices_differ():
            super().run(op)

    def load_states(self) -> None:
        """Of masters, whose values are in the file too."""
        kept = [(weight, weight.copy()) for _, param in self._halves() for weight in param.list_data()]
        super().load_states()
        for weight, before in kept:
            weight[:] = before

    def _devices_differ(self) -> bool:
        return not are_equal(param.list_data() for param in self.full.trained)

    def _halves(self) -> list[tuple]:
        both = zip(self.low.trained, self.full.trained)
        return [(low, full) for low, full in both if low.name in self.full.halves]

    def user_write(self) -> None:
        """Into a float16 array: the next update starts from what was written, element by element."""
        self.low.weights()  # what was written before is the masters', or writing it back would be no write
        matrices = [pair for pair in self._halves() if len(pair[0].shape) == 2]
        if not matrices:
            return
        (low, full), device = self.rng.choice(matrices), self.rng.randrange(len(self.devices))
        write, is_shared = WRITES[self.draw("write", *WRITES)], isinstance(self.low.trainer._optimizer, Plain)
        # A user's own optimizer updates one device, and the others get a copy.
        for each in range(len(self.devices)) if is_shared else [device]:
            write(low.list_data()[each])
            weight = full.list_data()[each]
            weight[:] = written(weight, write)

    def average(self) -> None:
        """Weights are swapped for others and put back, which loses nothing of the masters; the twin does nothing."""
        self.low.weights()  # what was written is the masters'
        keep, in_place = KEEP[self.draw("keep", *KEEP)], self.draw("in place", True, False)
        params, devices = [low for low, _ in self._halves()], range(len(self.devices))
        full = [mx.nd.array(value(param)) for param in params]
        if self._devices_differ() or any(param.held_masters.before for param in params):
            return  # what ``set_data`` has set since the last update is kept in float16 only
        if not all(np.isfinite(weight.asnumpy()).all() for weight in full):
            return  # FP32 values are compared as a whole, and NaN equals nothing
        kept = [[keep(array) for array in param.list_data()] for param in params]
        for factor in (0.25, 1 + 2.0**-13):  # the second one is rounded to most of the same float16 values
            for param, weight in zip(params, full):
                self._set(param, [weight * factor for _ in devices], in_place)
            self.low.net.save_parameters(str(self.folder / "average.params"))
            self.low.outputs()
        for param, arrays in zip(params, kept):
            self._set(param, arrays, in_place)

    def _set(self, param: mx.gluon.Parameter, values: list, in_place: bool) -> None:
        if in_place:
            for array, value in zip(param.list_data(), values):
                array[:] = value
        else:
            param.set_data(values[0])


# -- Modules ----------------------------------------------------------------------------------------


class CastModule(ModuleSide):
    """A Module with FP32 parameters, to which the gradients of its outputs are given with the scale."""

    halves: Collection[str] = ()
    scale = 1.0

    def backward(self, seed: int, scale: float = 1.0) -> None:
        self.scale = scale
        self._rescale(scale)
        self._round()
        self.module.backward([array(seed + 77, BATCH, 3) * scale])
        self._round()
        self._rescale(1 / scale)

    def reduce(self, scale: float) -> None:
        self._rescale(scale)
        add_on_the_first(grads for name, grads in self.gradients().items() if name in self.halves)
        self._round()
        self._rescale(1 / scale)

    def input_grads(self) -> list[np.ndarray]:
        return [grad / np.float32(self.scale) for grad in super().input_grads()]

    def _rescale(self, factor: float) -> None:
        for grads in self.gradients().values():
            for grad in grads:
                grad *= factor

    def _round(self) -> None:
        for name, grads in self.gradients().items():
            round_all_of(grads if name in self.halves else [])


class MastersModulePair(ModulePair):
    """What a sequence of calls does to a Module whose parameters are stored in float16, and to its twin."""

    environment: ClassVar[dict[str, str]] = {}
    OPS = (*ModulePair.OPS, "user_write", "user_write")
    TAKES_THE_MEAN = ("load_states", "new_optimizer", "rebind", "add", "write", "null")  # of the devices

    def __init__(self, seed: int, folder: Path, forced: dict[str, Any]) -> None:
        super().__init__(seed, folder, {"head": "plain", **forced})

    def made(self, draws: Callable) -> tuple[ModuleSide, ModuleSide]:
        low, full = ModuleSide(draws(), MASTERS), CastModule(draws(), CASTS, scales=False)
        full.halves = low.module.core.low_names
        assert full.halves
        return low, full

    def run(self, op: str) -> None:
        arrays = self.full.module._exec_group.param_arrays
        if op not in self.TAKES_THE_MEAN or are_equal(arrays):
            super().run(op)

    def load_states(self) -> None:
        """Of masters, whose values are in the file too."""
        before = {name: mx.nd.array(value) for name, value in zip(sorted(self.full.halves), self.full.weights())}
        super().load_states()
        self.full.module.set_params(before, {})

    def user_write(self) -> None:
        self.low.module.core.weights(self.low.module.arrays())  # take over what was written before
        name, device = self.rng.choice(["fc1_weight", "fc2_weight"]), self.rng.randrange(len(self.low.devices))
        write = WRITES[self.draw("write", *WRITES)]
        low, full = (dict(zip(g.param_names, g.param_arrays)) for g in (s.module._exec_group for s in self.sides))
        write(low[name][device])
        full[name][device][:] = written(full[name][device], write)
        for side in self.sides:
            side.module._params_dirty = True  # as after an update, or MXNet does not look at them
        same(self.low.weights(), self.full.weights(), "weights that were written")
