"""What users give to the diagnostics; the one file of ``diagnose`` that knows the networks of both frontends."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping, Sequence, Union

import mxnet as mx
from mxnet.gluon import Block

from ...gluon import Trainer
from ...gluon.blocks import blocks_of, with_names_of
from ...messages import class_of, instead
from ...policy import Policy
from ...precision.plan import Plan, read_policy
from ...shapes import check_shapes
from ...step.gradients import listed
from ...symbolic import BucketingModule, Module
from .of_gluon import reading as of_nets
from .of_gluon.plain import stand_ins as gluon_stand_ins
from .of_gluon.replaying import ReplayedNet
from .of_gluon.training import TrainedNet
from .of_symbolic.plain import stand_ins as symbolic_stand_ins
from .of_symbolic.reading import bound_graphs
from .of_symbolic.replaying import ReplayedModule, replayed_symbol
from .of_symbolic.training import TrainedModule
from .protocol import CalledGraph, ConvertedGraph, ReplayedNetwork, TrainedNetwork
from .stand_ins import StepRecorder

Network = Union[Block, Module, BucketingModule]


def is_network(target: Any) -> bool:
    return isinstance(target, (Block, Module, BucketingModule))


def kind_of(target: Any) -> str:
    """Return the class of an object of the wrong kind, with a hint at what to pass instead."""
    return f"{class_of(target)}{instead(target)}"


def check_positive(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def called_graphs(target: Any, inputs: Sequence[Any], shapes: dict[str, tuple]) -> list[CalledGraph]:
    """Return the graphs that ``advise`` counts; its arguments are advise's.
    That is one, or of a net with Python parts each outermost block that runs as a graph.
    """
    if isinstance(target, mx.sym.Symbol):
        if inputs:
            raise ValueError("a Symbol's shapes are given by name: advise(symbol, data=(32, 3, 224, 224))")
        check_shapes(shapes, target.list_inputs(), ["policy", "device", "exclude"])
        known = {name: (tuple(shape), "float32") for name, shape in shapes.items()}
        return [CalledGraph(target.name or "symbol", target, known, frozenset())]
    if not isinstance(target, Block):
        raise TypeError(f"advise takes a gluon Block or a Symbol, got {kind_of(target)}")
    if shapes or not inputs:
        raise ValueError("a net takes its inputs in order: advise(net, x), or advise(net, (32, 3, 224, 224))")
    return of_nets.called_graphs(target, inputs)


def policy_for(
    target: Block | mx.sym.Symbol, policy: str | Policy | Plan | None, exclude: Iterable[str]
) -> tuple[Policy, Plan | None]:
    """Return the Policy and Plan, if any, that ``policy`` means for ``target``; None means that of a converted net."""
    if not isinstance(target, Block):
        return read_policy(policy or "float16", exclude)
    requested, plan = read_policy(policy or of_nets.policy_of(target) or "float16", exclude)
    return requested, plan and with_names_of(blocks_of(target), plan)


def converted_graphs(target: Network, inputs: Sequence[Any]) -> tuple[list[ConvertedGraph], list[str]]:
    """Return the graphs of a converted net or bound module, with plans, and the names of blocks that run as Python.
    A net without a graph is called once with ``inputs``, which are not used otherwise.
    """
    if not isinstance(target, Block):
        return bound_graphs(target), []
    return of_nets.converted_graphs(target, inputs), of_nets.unconverted_blocks(target)


def trained_network(target: Network, trainer: Trainer | None = None) -> TrainedNetwork:
    """Return what the diagnostics of training use of a net with its ``trainer``, or of a module."""
    if isinstance(target, (Module, BucketingModule)):
        if trainer is not None:
            raise TypeError("a module steps by itself: pass no trainer with it")
        return TrainedModule(target)
    if not isinstance(target, Block):
        raise TypeError(
            "expected a converted gluon Block and its mxmp.Trainer, or an mxmp.Module or BucketingModule, got "
            f"{kind_of(target)}"
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
            f"expected a gluon Block, an mxmp.Module or BucketingModule, or a Symbol, got {kind_of(target)}"
        )
    if loss is None:
        return ReplayedNet(target, None, _listed(batch), (), how)
    if not callable(loss) or not isinstance(batch, (list, tuple)) or len(batch) != 2:
        raise TypeError("of a net, audit takes its loss and a pair (inputs, labels): audit(net, loss_fn, (x, y))")
    return ReplayedNet(target, loss, _listed(batch[0]), _listed(batch[1]), how)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else listed(value)


def stand_ins(mode: str, recorder: StepRecorder, *, imperative: bool) -> dict[Any, Any]:
    """Return what stands in for each public name of both frontends in a run of ``verify``, by the real object."""
    return {**gluon_stand_ins(mode, recorder, imperative=imperative), **symbolic_stand_ins(mode, recorder)}
