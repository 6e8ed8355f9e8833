"""Whose code calls: a warning names its line."""

from __future__ import annotations

import warnings
from inspect import currentframe
from types import FrameType

_INSIDE = ("mxnet", "mxmp", "contextlib")


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's that led here, and not at one in MXNet or mxmp."""
    level, frame = 1, currentframe()
    while frame is not None and _package_of(frame) in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def is_called_by_user(*, through: str | None = None) -> bool:
    """Return whether code outside mxnet and mxmp directly called the function that calls this one, or by a module of
    mxmp's, ``through``, that passes calls on."""
    # MXNet's own code calls the same methods as a user: ``data`` when it infers shapes, ``set_data`` to load a file,
    # ``grad`` in its Trainer, and a Module's executors in each step. A user who gets a float16 array may write into it,
    # so that it is compared with its FP32 master in each step.
    frame = currentframe()
    for _ in range(2):  # a frame that keeps itself in a variable would keep its callers' objects alive
        frame = frame and frame.f_back
    while frame is not None and frame.f_globals.get("__name__") == through:
        frame = frame.f_back
    return frame is not None and _package_of(frame) not in ("mxnet", "mxmp")


def _package_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
