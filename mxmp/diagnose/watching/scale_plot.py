"""The loss scale over time, as a picture. matplotlib is imported when it is drawn."""

from __future__ import annotations

from typing import Any, Sequence

from ...step.step import ScaleEvent, StepView
from ..shared.pictures import figure_of, saved
from .snapshot import Snapshot
from .watch import Watch

__all__ = ["plot_loss_scale"]


def plot_loss_scale(
    run: StepView | Sequence[ScaleEvent], path: str | None = None, *, watched: Watch | Sequence[Snapshot] = ()
) -> Any:
    """The loss scale from step to step, and which steps were skipped.

    Parameters
    ----------
    run : Trainer, Module, BucketingModule or sequence of ScaleEvent
        Whose ``scale_history`` is drawn, up to the last step taken.
    path : str, optional
        Where to save the picture; its ending says in which format.
    watched : Watch or sequence of Snapshot
        Of the same run: adds the share of the gradient values that round to zero, and how far up the scale
        could have gone.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        Without matplotlib.
    ValueError
        There is no event.
    """
    events = list(run.scale_history if isinstance(run, StepView) else run)
    if not events:
        raise ValueError("scale_history is empty: the first scale is its first event")
    snapshots = list(watched.snapshots if isinstance(watched, Watch) else watched)
    taken = run._state.steps if isinstance(run, StepView) else 1
    end = max(events[-1].step, taken, *(s.step for s in snapshots))
    steps, scales = [e.step for e in events], [e.loss_scale for e in events]
    figure = figure_of((10, 5.5 if snapshots else 3.5))
    axes = figure.subplots(2 if snapshots else 1, 1, sharex=True, squeeze=False)[:, 0]
    axes[0].step([*steps, end], [*scales, scales[-1]], where="post", label="loss scale", color="tab:blue")
    # the event after a skip carries the scale of the next step; the skipped one ran at the scale before it
    skips = [(e.step - 1, before.loss_scale) for before, e in zip(events, events[1:]) if e.skipped]
    if skips:
        label = f"{len(skips)} skipped step{'s' if len(skips) > 1 else ''}"
        axes[0].plot(*zip(*skips), "x", color="firebrick", label=label)
    axes[0].set_yscale("log", base=2)
    axes[0].set_ylabel("loss scale")
    if snapshots:
        at = [s.step for s in snapshots]
        room = [s.loss_scale * 2.0 ** min(s.headroom, 120) if s.headroom > -120 else float("nan") for s in snapshots]
        axes[0].plot(at, room, color="0.6", linewidth=1, label="largest scale without overflow, where watched")
        axes[1].plot(at, [100 * s.underflow for s in snapshots], label="at this scale", color="tab:blue")
        axes[1].plot(at, [100 * s.underflow_unscaled for s in snapshots], label="without scaling", color="0.6")
        axes[1].set_ylabel("% of gradient values\nthat round to zero")
        axes[1].set_ylim(bottom=0)
        axes[1].legend(fontsize=8)
    axes[0].legend(fontsize=8)
    axes[-1].set_xlabel("step")
    return saved(figure, path)
