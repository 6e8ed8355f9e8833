"""The parts that all recipes share: options, seed, learning curve and result. Not a recipe.

``float32`` is MXNet's own, with nothing of mxmp in it: no conversion and a ``gluon.Trainer``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

import mxmp

DTYPES = ("float32", "float16", "bfloat16")
MXNET_DTYPES = {"float16": "float16", "bfloat16": np.dtype([("bfloat16", np.uint16)])}  # as MXNet's amp names it
QUICK_STEPS = 2
POINTS = 50  # of a curve that is kept


def parser(doc: str, epochs: int, state: bool = False) -> argparse.ArgumentParser:
    """Return a parser of the options of every recipe, with ``--state`` where a run can go on where it was ended.

    A recipe may add its own before it parses them.
    """
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--dtype", choices=DTYPES, default="float16")
    made.add_argument("--seed", type=int, default=0, help="of weights, data order and noise; the split is fixed")
    made.add_argument("--epochs", type=positive, default=epochs, help=f"default: {epochs}")
    made.add_argument(
        "--loss-scale", type=loss_scale, default="dynamic", help="dynamic (the default), none or a number"
    )
    made.add_argument("--no-masters", action="store_true", help="keep weights and the optimizer in --dtype")
    made.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, for tests: the result means nothing")
    made.add_argument("--out", type=Path, help="file of the result, JSON")
    if state:
        made.add_argument("--state", type=Path, help="folder of a run's state; made when it is missing")
    return made


def positive(text: str) -> int:
    """Return the number of an option; argparse shows the error where it is below 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}; expected a whole number from 1")
    return number


def loss_scale(text: str) -> str:
    """Return the option as it is; raise ``ValueError`` where it is not a loss scale."""
    if text not in ("dynamic", "none"):
        mxmp.StaticLossScaler(float(text))  # its error says what is allowed
    return text


class Run:
    """One run of a recipe: the user's options, and the losses and the result.

    Parameters
    ----------
    options : argparse.Namespace
        The options that a ``parser`` of this module parsed.
    family, metric : str
        Such as ``"resnet50"`` and ``"top-1, %"``.
    chance : float
        The metric of a network that has learnt nothing (it guesses, or knows frequencies only; the recipe says which).
    """

    def __init__(self, options: argparse.Namespace, family: str, metric: str, chance: float) -> None:
        if options.dtype == "float32" and (options.no_masters or options.loss_scale not in ("dynamic", "none")):
            raise ValueError("float32 has neither masters nor a loss scale: no --no-masters, and no --loss-scale")
        self.options, self.family, self.metric, self.chance = options, family, metric, chance
        self.quick, self.epochs = options.quick, options.epochs
        self.losses: list[float] = []
        self.trainers: list[Any] = []  # and modules
        self.random = np.random.RandomState(options.seed)  # for data: networks must not change its order
        mx.random.seed(options.seed)
        np.random.seed(options.seed)  # MXNet's initializers draw from it
        random.seed(options.seed)  # mx.rnn.BucketSentenceIter shuffles by it
        self._start = time.time()

    @property
    def loss_scale(self) -> Any:
        """Return the loss scale as ``mxmp.Trainer`` and ``mxmp.Module`` take it."""
        text = self.options.loss_scale
        return text if text == "dynamic" else None if text == "none" else float(text)

    def convert(self, net: gluon.Block, **options: Any) -> gluon.Block:
        """Return ``mxmp.convert(net, dtype)``; for float32 the net itself, hybridized."""
        if self.options.dtype == "float32":
            net.hybridize()
            return net
        return mxmp.convert(net, self.options.dtype, **options)

    def trainer(self, params: Any, optimizer: str, settings: dict[str, Any]) -> Any:
        """Return ``mxmp.Trainer(params, optimizer, settings)``; for float32 a ``gluon.Trainer`` with its methods."""
        if self.options.dtype == "float32":
            made = PlainTrainer(params, optimizer, settings)
        else:
            chosen = TrainerWithoutMasters if self.options.no_masters else mxmp.Trainer
            made = chosen(params, optimizer, settings, loss_scale=self.loss_scale)
            made.dtype = self.options.dtype
        self.trainers.append(made)
        return made

    def module(self, symbol: mx.sym.Symbol, **options: Any) -> mx.mod.Module:
        """Return ``mxmp.Module(symbol, policy=dtype)``; for float32 MXNet's own."""
        if self.options.no_masters:
            raise ValueError("--no-masters: a Module keeps its masters; recipes without a Module can do without")
        if self.options.dtype == "float32":
            return mx.mod.Module(symbol, **options)
        made = mxmp.Module(symbol, policy=self.options.dtype, loss_scale=self.loss_scale, **options)
        self.trainers.append(made)
        return made

    def batches(self, *arrays: np.ndarray, size: int) -> Iterator[list[NDArray]]:
        """Yield batches for all epochs, shuffled anew in each; rows that do not fill a batch are left out."""
        for epoch in range(self.epochs):
            first = len(self.losses)
            order = self.random.permutation(len(arrays[0]))
            for start in range(0, len(order) - size + 1, size):
                if self.quick and len(self.losses) >= QUICK_STEPS:
                    return
                rows = order[start : start + size]
                yield [mx.nd.array(array[rows], dtype=array.dtype) for array in arrays]
            print(f"epoch {epoch + 1:3}: loss {np.mean(self.losses[first:]):.4f}", flush=True)

    def log(self, loss: NDArray) -> None:
        """Keep the loss of one step, of any shape, after ``trainer.step``. Waits for the device."""
        self.keep(float(loss.mean().asscalar()))

    def log_metric(self, state: Any) -> None:
        """Keep the loss of one step: a ``batch_end_callback`` of ``Module.fit`` whose ``eval_metric`` is the loss."""
        self.keep(state.eval_metric.get()[1])
        state.eval_metric.reset()

    def keep(self, loss: float) -> None:
        """Keep the loss of one step."""
        self.losses.append(loss)

    def save(self, net: gluon.Block, trainer: Any) -> None:
        """Write what the run needs to go on in ``--state``, where there is one, in a folder that appears complete."""
        folder = self.options.state
        if not folder:
            return
        before, new = list(folder.glob("step-*")), folder / "new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        net.save_parameters(str(new / "net.params"))
        trainer.save_states(str(new / "trainer.states"))
        (new / "losses.json").write_text(json.dumps(self.losses))
        new.rename(folder / f"step-{len(self.losses):06}")
        for old in before:
            shutil.rmtree(old)

    def resume(self, net: gluon.Block, trainer: Any) -> None:
        """Read what ``save`` wrote last in ``--state``; nothing where there is nothing."""
        folder = self.options.state
        for last in sorted(folder.glob("step-*"))[-1:] if folder else ():
            net.load_parameters(str(last / "net.params"))
            trainer.load_states(str(last / "trainer.states"))
            self.losses = json.loads((last / "losses.json").read_text())

    def finish(self, value: float, **more: Any) -> dict[str, Any]:
        """Print and return the result, and write it to ``--out``; ``more`` is added to it."""
        result = {
            "family": self.family,
            "dtype": self.options.dtype,
            "seed": self.options.seed,
            "loss_scale": self.options.loss_scale,
            "masters": not self.options.no_masters,
            "quick": self.quick,
            "metric": self.metric,
            "value": round(float(value), 4),
            "chance": self.chance,
            "steps": len(self.losses),
            "skipped": sum(getattr(trainer, "skipped_steps", 0) for trainer in self.trainers),
            "seconds": round(time.time() - self._start, 1),
            "curve": thinned(self.losses),
            **more,
        }
        print(f"{self.family} in {result['dtype']}: {result['value']:g} {self.metric} (chance: {self.chance:g})")
        if self.options.out:
            self.options.out.write_text(json.dumps(result) + "\n")
        return result


class PlainTrainer(gluon.Trainer):
    """``gluon.Trainer`` with the method by which mxmp's starts a backward."""

    def backward(self, loss: NDArray | Sequence[NDArray], retain_graph: bool = False) -> None:
        """Compute the gradients of a loss, or of several."""
        autograd.backward(loss, retain_graph=retain_graph)


class TrainerWithoutMasters(mxmp.Trainer):
    """A trainer that shows what masters are for: after each step it rounds weights and states to their dtype.

    MXNet's optimizers do so for float16 weights with ``multi_precision=False``.
    """

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Update the weights, then round them and the optimizer's states."""
        super().step(*args, **kwargs)
        weights = [weight for param in self._params if param.grad_req != "null" for weight in param.list_data()]
        for array in [*weights, *arrays_in([updater.states for updater in self._updaters])]:
            mx.nd.amp_cast(mx.nd.amp_cast(array, dtype=MXNET_DTYPES[self.dtype]), dtype="float32", out=array)


def arrays_in(states: Any) -> Iterator[NDArray]:
    """Yield the arrays of an optimizer's states, which may be nested."""
    if isinstance(states, NDArray):
        yield states
    elif states is not None:
        for state in states.values() if isinstance(states, dict) else states:
            yield from arrays_in(state)


def warmed_up(rate: float, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0: it rises over a tenth of the steps, then falls to zero."""
    return rate * min(10 * (step + 1) / steps, 1.1 * (1 - step / steps), 1)


def thinned(losses: Sequence[float]) -> list[list[float]]:
    """Return at most ``POINTS`` pairs of a step and the mean loss of the steps around it."""
    parts = np.array_split(np.arange(len(losses)), min(POINTS, len(losses)))
    return [point(losses, part) for part in parts]


def point(losses: Sequence[float], steps: Sequence[int]) -> list[float]:
    """Return the number of the last of ``steps``, from 1, and their mean loss to four digits."""
    return [int(steps[-1]) + 1, float(f"{np.mean(np.take(losses, steps)):.4g}")]


def predictions(net: Callable, arrays: np.ndarray, size: int = 64) -> np.ndarray:
    """Return the net's outputs for all of an array, computed in batches. Waits for the device."""
    parts = range(0, len(arrays), size)
    return np.concatenate([net(mx.nd.array(arrays[i : i + size])).asnumpy() for i in parts])


def top_1(net: Callable, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of images, in %, whose highest score is their label's. Waits for the device."""
    return 100 * float((predictions(net, images).argmax(axis=1) == labels).mean())
