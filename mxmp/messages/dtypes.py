"""What to say of inputs of another dtype than the weights, and of shapes that only arrays broadcast."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import Any, Iterable, Iterator

import mxnet as mx
import numpy as np

from ..host.callbacks import last_line


@contextmanager
def dtypes_explained(inputs: Iterable[Any]) -> Iterator[None]:
    """Say what to do where MXNet refuses inputs, arrays or DataDescs, beside FP32 weights, such as float64 data, or an
    operator between Symbols of two shapes."""
    try:
        yield
    except RuntimeError as error:  # MXNetError is one, and ``simple_bind`` raises others
        odd = sorted({np.dtype(each.dtype).name for each in inputs} - {"float32"})
        from .shapes import broadcasting  # what is said is loaded where it is needed

        said = last_line(error)
        if hint := broadcasting(said):
            raise mx.MXNetError(f"{hint}. MXNet says: {said}") from error
        mixed = re.search(r"expected (\w+), got (\w+)", said)
        if not (("requires uniform type" in said and odd) or (mixed and {*mixed.groups()} & {*odd})):
            raise
        raise mx.MXNetError(
            f"an input is {' or '.join(odd)}, and an operator multiplies it by weights of another dtype: call "
            f"x.astype('float32') first. MXNet says: {said}"
        ) from error
