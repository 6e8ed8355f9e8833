"""What users look into: the one file of this room that knows both frontends."""

from __future__ import annotations

from typing import Any

from mxnet.gluon import Block

from ...frontend import TrainedNetwork
from ...gluon.training import TrainedNet
from ...symbolic import BucketingModule, Module
from ...symbolic.training import TrainedModule

__all__ = ["trained"]


def trained(target: Any, trainer: Any = None) -> TrainedNetwork:
    """Return a converted net with its trainer, or a module that has an optimizer, as a network that trains.

    Raises
    ------
    TypeError
        ``target`` is neither, ``trainer`` is no mxmp.Trainer, or one is passed with a module.
    ValueError
        The net is not converted, or the module has no optimizer.
    """
    if isinstance(target, (Module, BucketingModule)):
        if trainer is not None:
            raise TypeError("a module steps by itself: pass no trainer with it")
        return TrainedModule(target)
    if not isinstance(target, Block):
        raise TypeError(
            "expected a converted gluon Block and its mxmp.Trainer, or an mxmp.Module or BucketingModule, got "
            f"{type(target).__module__}.{type(target).__name__}"
        )
    return TrainedNet(target, trainer)
