"""The networks that users look into: the one file of ``diagnose`` that knows both frontends."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence, Union

import mxnet as mx
from mxnet.gluon import Block

from ...frontend import ConvertedGraph, ReplayedNetwork, TrainedNetwork, instead, listed
from ...gluon import Trainer
from ...gluon import reading as of_nets
from ...gluon.blocks import blocks_of, with_names_of
from ...gluon.reading import called_graphs, policy_of
from ...gluon.replaying import ReplayedNet
from ...gluon.training import TrainedNet
from ...policy import Policy
from ...precision.plan import Plan
from ...symbolic import BucketingModule, Module
from ...symbolic.reading import bound_graphs
from ...symbolic.replaying import ReplayedModule, replayed_symbol
from ...symbolic.training import TrainedModule

__all__ = [
    "Network",
    "Trainer",
    "blocks_of",
    "called_graphs",
    "converted_graphs",
    "is_network",
    "policy_of",
    "replayed_network",
    "trained_network",
    "with_names_of",
]

Network = Union[Block, Module, BucketingModule]


def is_network(target: Any) -> bool:
    return isinstance(target, (Block, Module, BucketingModule))


def converted_graphs(target: Network, inputs: Sequence[Any]) -> tuple[list[ConvertedGraph], list[str]]:
    """Return the graphs of a converted net or bound module, with plans, and the names of blocks that run as Python.
    A net without a graph is called once with ``inputs``, which are not used otherwise.
    """
    if not isinstance(target, Block):
        return bound_graphs(target), []
    return of_nets.converted_graphs(target, inputs), of_nets.unconverted_blocks(target)


def trained_network(target: Any, trainer: Any = None) -> TrainedNetwork:
    """Return what the diagnostics of training use of a net with its ``trainer``, or of a module."""
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


def replayed_network(
    target: Any, loss: Callable | None, batch: Any, how: Policy | Plan | None, params: Mapping[str, Any] | None
) -> ReplayedNetwork:
    """Return by what ``audit`` replays a batch of a net, a module or a Symbol; the arguments are audit's."""
    if isinstance(target, mx.sym.Symbol):
        if not isinstance(batch, Mapping) or how is None or params is None:
            raise TypeError("of a Symbol, audit takes a dict of arrays by name, and policy= and params=")
        return replayed_symbol(target, params, batch, loss, how)
    if params is not None:
        raise TypeError("params= is for a Symbol: a net and a module have their own parameters")
    if isinstance(target, (Module, BucketingModule)):
        if how is not None or not hasattr(batch, "data"):
            raise TypeError("of a module, audit takes the loss or None, and a DataBatch: audit(module, None, batch)")
        return ReplayedModule(target, loss, batch)
    if not isinstance(target, Block):
        raise TypeError(
            "expected a gluon Block, an mxmp.Module or BucketingModule, or a Symbol, got "
            f"{type(target).__module__}.{type(target).__name__}"
        )
    if loss is None:
        return ReplayedNet(target, None, _listed(batch), (), how)
    if not callable(loss) or not isinstance(batch, (list, tuple)) or len(batch) != 2:
        raise TypeError("of a net, audit takes its loss and a pair (inputs, labels): audit(net, loss_fn, (x, y))")
    return ReplayedNet(target, loss, _listed(batch[0]), _listed(batch[1]), how)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else listed(value)
