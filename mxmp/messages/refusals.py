"""Where MXNet may refuse what a user gave: its errors say what to do."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterable, Iterator


@contextmanager
def inputs_explained(inputs: Iterable[Any]) -> Iterator[None]:
    """Say what to do where MXNet refuses inputs, arrays or DataDescs, such as float64 data beside FP32 weights."""
    try:
        yield
    except RuntimeError as error:  # MXNetError is one, and ``simple_bind`` raises others
        from .inputs import explained  # what is said is loaded where it is needed

        new = explained(error, inputs)
        if new is None:
            raise
        raise new from error
