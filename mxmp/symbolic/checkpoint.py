"""Checkpoints on disk: a Symbol and its parameters, in MXNet's formats. A file appears completely or not at all."""

from __future__ import annotations

import errno
import os
import struct
from typing import Any, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..files import replacing

__all__ = ["SavesCheckpoints", "SavesParams", "write_arrays", "write_symbol"]


class SavesParams(mx.mod.BaseModule):
    """A module whose ``save_params`` notices a full disk."""

    def save_params(self, fname: str) -> None:
        """Save an FP32 file, as ``mx.mod.BaseModule.save_params``.

        Raises
        ------
        OSError
            The disk is full or the folder cannot be written; names the file. The old file stays as it was.
        """
        args, auxs = self.get_params()
        named = {**{f"arg:{k}": v for k, v in args.items()}, **{f"aux:{k}": v for k, v in auxs.items()}}
        with replacing(fname) as path:
            write_arrays(path, {k: v.as_in_context(mx.cpu()) for k, v in named.items()})


class SavesCheckpoints(SavesParams):
    """A module of one Symbol."""

    _symbol: Any

    def save_checkpoint(
        self, prefix: str, epoch: int, save_optimizer_states: bool = False, remove_amp_cast: bool = True
    ) -> None:
        """Save FP32 files that ``mx.mod.Module.load`` opens without mxmp; each appears completely or not at all."""
        with replacing(f"{prefix}-symbol.json") as path:
            write_symbol(path, self._symbol, remove_amp_cast)
        self.save_params(f"{prefix}-{epoch:04d}.params")
        if save_optimizer_states:
            self.save_optimizer_states(f"{prefix}-{epoch:04d}.states")
        self.logger.info("Saved checkpoint %s-%04d", prefix, epoch)


def write_symbol(path: str, symbol: mx.sym.Symbol, remove_amp_cast: bool = True) -> None:
    """Save a Symbol as ``symbol.save`` does, whose own writer does not notice a full disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(symbol.tojson(remove_amp_cast=remove_amp_cast))


def write_arrays(path: str, arrays: Mapping[str, NDArray] | Sequence[NDArray]) -> None:
    """Save as ``mx.nd.save``, which closes a file without checking that its last buffer was written.

    Names come last, so a file that ends with them is complete. A file without names is read back.

    Raises
    ------
    OSError
        Something is missing.
    """
    names = [name.encode() for name in arrays] if isinstance(arrays, Mapping) else []
    end = struct.pack("=Q", len(names)) + b"".join(struct.pack("=Q", len(name)) + name for name in names)
    incomplete = OSError(errno.EIO, "MXNet could not write all of it, is the disk full?")
    try:
        mx.nd.save(path, arrays)
        if not names:
            mx.nd.load(path)
    except mx.MXNetError as error:
        raise incomplete from error
    with open(path, "rb") as file:
        file.seek(-min(len(end), os.path.getsize(path)), os.SEEK_END)
        if file.read() != end:
            raise incomplete
