"""Checkpoints on disk: a Symbol and its parameters, in MXNet's formats, whole or not there."""

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
    """A module whose ``save_params`` says where the disk was full."""

    def save_params(self, fname: str) -> None:
        """As ``mx.mod.BaseModule.save_params``: a plain FP32 file, whole or not there.

        Raises
        ------
        OSError
            The disk is full or the folder cannot be written; names the file.
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
        """Plain FP32 files that ``mx.mod.Module.load`` opens without mxmp; each appears whole or not at all."""
        with replacing(f"{prefix}-symbol.json") as path:
            write_symbol(path, self._symbol, remove_amp_cast)
        self.save_params(f"{prefix}-{epoch:04d}.params")
        if save_optimizer_states:
            self.save_optimizer_states(f"{prefix}-{epoch:04d}.states")
        self.logger.info("Saved checkpoint %s-%04d", prefix, epoch)


def write_symbol(path: str, symbol: mx.sym.Symbol, remove_amp_cast: bool = True) -> None:
    """``symbol.save``, whose own writer does not notice a full disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(symbol.tojson(remove_amp_cast=remove_amp_cast))


def write_arrays(path: str, arrays: Mapping[str, NDArray] | Sequence[NDArray]) -> None:
    """``mx.nd.save``, and a look at what it wrote.

    MXNet closes the file without asking whether its last buffer could be written. What comes last are
    the names, so a file that ends with them is whole.

    Raises
    ------
    OSError
        Something is missing.
    """
    try:
        mx.nd.save(path, arrays)
    except mx.MXNetError as error:
        raise _incomplete() from error
    names = [name.encode() for name in arrays] if isinstance(arrays, Mapping) else []
    end = struct.pack("=Q", len(names)) + b"".join(struct.pack("=Q", len(name)) + name for name in names)
    with open(path, "rb") as file:
        file.seek(-min(len(end), os.path.getsize(path)), os.SEEK_END)
        if file.read() != end:
            raise _incomplete()
    if not names:
        _read_back(path)


def _read_back(path: str) -> Any:
    """Without names the end looks like any zeros."""
    try:
        return mx.nd.load(path)
    except mx.MXNetError as error:
        raise _incomplete() from error


def _incomplete() -> OSError:
    return OSError(errno.EIO, "MXNet could not write all of it, is the disk full?")
