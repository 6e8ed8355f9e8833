"""Executors of another policy in a module that trains: values, states and outputs go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Collection, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..policy import excluding
from ..precision.plan import Plan
from ..step.masters import assign
from .bucketing import BucketingModule
from .core import Core
from .module import Module

__all__ = ["exclude_more"]


def exclude_more(target: Module | BucketingModule, nodes: Collection[str]) -> None:
    """Keep these nodes in FP32 too, in all buckets. Between two steps: gradients are forgotten.

    A Monitor that was installed in a Module must be installed again.
    """
    modules = list(target.modules.values()) if isinstance(target, BucketingModule) else [target]
    _exclude(target, modules, nodes)
    first, *others = bound = [module for module in modules if module.binded]
    core, before = first._core, first._core.low_names
    # On each device of its own: running statistics differ there, and a mean of equals can be off by a bit.
    weights = {weight.name: list(weight.masters or weight.arrays) for weight in core.weights(first._arrays())}
    core.decide_anew()
    _bind(first, None)
    for module in others:
        _bind(module, first)
    core.make_masters(first._arg_params, first._arrays())
    _set_weights(core, weights, first._arrays())
    target._params_dirty = first._params_dirty = True
    if first._kvstore is not None and core.low_names != before:
        _renew_store(bound)
    if isinstance(target, BucketingModule) and target._monitor is not None:
        for module in bound:
            module.install_monitor(target._monitor)


def _exclude(target: Module | BucketingModule, modules: list[Module], nodes: Collection[str]) -> None:
    policy = excluding(modules[0].policy, nodes)
    how = replace(modules[0]._how, policy=policy) if isinstance(modules[0]._how, Plan) else policy
    for module in modules:
        module.policy, module._how = policy, how
    if isinstance(target, BucketingModule):
        target._mixed["policy"] = how


def _set_weights(core: Core, weights: Mapping[str, list[NDArray]], arrays: Mapping[str, Sequence[NDArray]]) -> None:
    for name, copies in arrays.items():
        for k, (value, array) in enumerate(zip(weights[name], copies)):
            if name in core.masters:
                assign(value, [core.masters[name][k]], [array])
            else:
                value.copyto(array)


def _bind(module: Module, shared: Module | None) -> None:
    before = list(module._exec_group.execs)
    training, inputs, request = module.for_training, module.inputs_need_grad, module._grad_req
    module.bind(module.data_shapes, module.label_shapes, training, inputs, True, shared, request)
    for old, new in zip(before, module._exec_group.execs):
        _go_on(old, new)


def _go_on(old: mx.executor.Executor, new: mx.executor.Executor) -> None:
    """Arguments, running statistics and outputs: a metric may read these after the step."""
    pairs: list[tuple[Mapping[str, NDArray], Mapping[str, NDArray]]] = [
        (old.arg_dict, new.arg_dict),
        (old.aux_dict, new.aux_dict),
    ]
    for values, arrays in pairs:
        for name in values.keys() & arrays.keys():
            values[name].copyto(arrays[name])
    for value, array in zip(old.outputs, new.outputs):
        value.copyto(array)


def _renew_store(modules: list[Module]) -> None:
    """A key keeps the dtype of its first array, which is the gradient's."""
    first = modules[0]
    store: Any = mx.kv.create(first._kvstore.type)
    with first._keys_as_gradients():
        for name in first._exec_group.param_names:
            store.init(name, first._arg_params[name])
    for module in modules:
        module._kvstore = store
