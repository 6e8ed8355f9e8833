"""What the runs of ``verify`` put in place of mxmp's public names, and what these tell it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Callable, ContextManager, Iterator, Mapping, Protocol, Sequence

from mxnet.ndarray import NDArray

from ...policy import Policy
from ...step.gradients import Gradient


class StepRecorder(Protocol):
    """What the stand-ins for a frontend's public names tell ``verify``; ``owner`` is what steps."""

    def note_policy(self, policy: Policy) -> None: ...

    def note_losses(self, owner: Any, losses: Sequence[NDArray]) -> None: ...

    def note_outputs(self, owner: Any, outputs: Sequence[NDArray]) -> None: ...

    def before_step(
        self,
        owner: Any,
        gradients: Sequence[Gradient],
        factor: float,  # of the gradients in the update
        weights: Mapping[str, NDArray],
        *,
        skipped: bool = False,
        own: bool = True,  # of mxmp, in place of which a run may have MXNet's
    ) -> None: ...

    def after_step(self, owner: Any, weights: Callable[[], Mapping[str, NDArray]]) -> None: ...

    def discarding(
        self, owner: Any, gradients: Sequence[Gradient], weights: Callable[[], Mapping[str, NDArray]]
    ) -> ContextManager[None]:
        """Record gradients that the block discards as a skipped step, where they overflow, or do so in low precision:
        a script that rejects an infinite norm applies that batch in plain MXNet."""

    @property
    def has_begun(self) -> bool:
        """Return whether there was a step."""

    def leaves_out(self, owner: Any) -> bool:
        """Return whether the next step of ``owner`` is one that the run in low precision has skipped."""

    def initial_value(self, param: Any, drawn: bool) -> None:
        """Give a gluon Parameter that has got values those with which all runs begin."""

    def settled(self, name: str, value: NDArray, drawn: bool, module: Any = None) -> NDArray:
        """Return the value with which all runs begin, ``value`` itself if it is that."""


def in_full_precision(policy: Policy) -> Policy:
    """Return the policy under which mxmp does all that it does, and every operator computes in FP32."""
    return replace(policy, exclude=(*policy.exclude, "*"), low_ops=())


class Inert:
    """Stands in for what plain MXNet does not have: it can be called, read, entered and printed, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __str__(self) -> str:
        return ""

    def __float__(self) -> float:
        return 0.0


class PlainScaler:
    """Stands in for any scaler: a loss scale of 1."""

    loss_scale = property(lambda self: 1.0, lambda self, value: None)
    at_floor = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def scale(self, value: Any) -> Any:
        return value

    unscale = scale

    def adjust(self, finite: bool) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "scale": 1.0}

    def load_state_dict(self, state: Any) -> None:
        pass


class PlainStep:
    """What a StepView has, of a plain trainer or module."""

    recorder: StepRecorder
    loss_scale = 1.0
    last_step_skipped = False
    skipped_steps = 0
    overflow_params: tuple[str, ...] = ()
    scale_history: Sequence[Any] = ()
    scaled_step = ledger = Inert()
    has_other_workers = False
    updates_masters = True

    shares_with: PlainStep | None = None  # the module whose parameters this one has

    @property
    def owner(self) -> Any:
        """Return what steps: modules that share their parameters are one, as in mxmp."""
        return self if self.shares_with is None else self.shares_with.owner

    @property
    def scaler(self) -> PlainScaler:
        return PlainScaler()

    @contextmanager
    def plain_step(
        self, gradients: Sequence[Gradient], factor: float, weights: Callable[[], Mapping[str, NDArray]]
    ) -> Iterator[bool]:
        """Record the update within the block; yield whether it is to be applied."""
        if not gradients:  # mxmp makes no step either: a module without parameters, or none that a backward reached
            yield True
            return
        skipped = self.recorder.leaves_out(self.owner)
        self.recorder.before_step(self.owner, gradients, factor, weights(), skipped=skipped)
        yield not skipped
        self.last_step_skipped = skipped
        self.skipped_steps += skipped
        self.recorder.after_step(self.owner, weights)
