"""The networks that users look into: the one file of ``diagnose`` that knows both frontends."""

from __future__ import annotations

from typing import Any, Sequence, Union

from mxnet.gluon import Block

from ...frontend import ConvertedGraph, TrainedNetwork, instead
from ...gluon import Trainer
from ...gluon import reading as of_nets
from ...gluon.blocks import blocks_of, with_names_of
from ...gluon.reading import called_graphs, policy_of
from ...gluon.training import TrainedNet
from ...symbolic import BucketingModule, Module
from ...symbolic.reading import bound_graphs
from ...symbolic.training import TrainedModule

__all__ = [
    "Network",
    "Trainer",
    "blocks_of",
    "called_graphs",
    "converted_graphs",
    "is_network",
    "policy_of",
    "trained_network",
    "with_names_of",
]

Network = Union[Block, Module, BucketingModule]


def is_network(target: Any) -> bool:
    """Return whether ``target`` is a Gluon Block, an mxmp.Module or an mxmp.BucketingModule."""
    return isinstance(target, (Block, Module, BucketingModule))


def converted_graphs(target: Network, inputs: Sequence[Any]) -> tuple[list[ConvertedGraph], list[str]]:
    """Return the FP32 graphs of a converted net or a bound module, with their plans, and the names of FP32 blocks.

    FP32 blocks are those of a net that run as Python, not as a graph; a module has none. A net that has no graph yet is
    called once with ``inputs``; in all other cases ``inputs`` are not used. Raises ``ValueError`` if the net is not
    converted, the net has no graph and there are no ``inputs`` (or the call runs no graph), or the module is not bound.
    """
    if not isinstance(target, Block):
        return bound_graphs(target), []
    return of_nets.converted_graphs(target, inputs), of_nets.unconverted_blocks(target)


def trained_network(target: Any, trainer: Any = None) -> TrainedNetwork:
    """Return an object by which diagnostics use a network that trains, in the same way for both frontends.

    ``target`` is a converted net and ``trainer`` its mxmp.Trainer; or ``target`` is an mxmp.Module or
    mxmp.BucketingModule with an optimizer, without ``trainer``. Raises ``TypeError`` for another type of object, and
    ``ValueError`` if the net is not converted or the module has no optimizer.
    """
    if isinstance(target, (Module, BucketingModule)):
        if trainer is not None:
            raise TypeError("a module steps by itself: pass no trainer with it")
        return TrainedModule(target)
    if not isinstance(target, Block):
        raise TypeError(
            "expected a converted gluon Block and its mxmp.Trainer, or an mxmp.Module or BucketingModule, got "
            f"{type(target).__module__}.{type(target).__name__}{instead(target)}"
        )
    return TrainedNet(target, trainer)
