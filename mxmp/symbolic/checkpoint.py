"""Checkpoints are written: a Symbol and its parameters, in MXNet's formats. A file appears completely or not at all."""

from __future__ import annotations

import errno
import os
import struct
from contextlib import contextmanager
from typing import Iterator, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..files import replacing


class SavesParams(mx.mod.BaseModule):
    """Has a ``save_params`` that raises an error if the disk is full, where MXNet's leaves a truncated file."""

    def save_params(self, fname: str) -> None:
        """Save all parameters and auxiliary states in FP32, in the format of ``mx.mod.BaseModule.save_params``.

        The file appears completely or not at all. Waits for the device. Raises ``OSError``, which names the file, if it
        cannot be written, for example on a full disk; an old file of that name is then unchanged.
        """
        args, auxs = self.get_params()
        named = {**{f"arg:{k}": v for k, v in args.items()}, **{f"aux:{k}": v for k, v in auxs.items()}}
        with replacing(fname) as path:
            write_arrays(path, {k: v.as_in_context(mx.cpu()) for k, v in named.items()})


def write_symbol(path: str, symbol: mx.sym.Symbol, remove_amp_cast: bool = True) -> None:
    # ``symbol.save`` would write the same text, but raises nothing if the disk is full.
    with open(path, "w", encoding="utf-8") as file:
        file.write(symbol.tojson(remove_amp_cast=remove_amp_cast))


def write_arrays(path: str, arrays: Mapping[str, NDArray] | Sequence[NDArray]) -> None:
    """Write arrays, by name or as a list; raise ``OSError`` unless the file is complete. Waits for the device."""
    # ``mx.nd.save`` does not notice a full disk when it closes the file. It writes the names last, so a file that ends
    # with them is complete. A file of a list has no names; it is read back instead.
    names = [name.encode() for name in arrays] if isinstance(arrays, Mapping) else []
    end = struct.pack("=Q", len(names)) + b"".join(struct.pack("=Q", len(name)) + name for name in names)
    with incomplete_if_it_fails():
        mx.nd.save(path, arrays)
        if not names:
            mx.nd.load(path)
        with open(path, "rb") as file:
            file.seek(-min(len(end), os.path.getsize(path)), os.SEEK_END)
            if file.read() != end:
                raise mx.MXNetError("it does not end with the names")


@contextmanager
def incomplete_if_it_fails() -> Iterator[None]:
    try:
        yield
    except mx.MXNetError as error:
        raise OSError(errno.EIO, "MXNet could not write all of it, is the disk full?") from error
