"""The optimizer states of a Module on disk, for any number of devices.

Module numbers weight ``i`` on device ``k`` as ``i * devices + k``; the file holds weight ``i``.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx

from . import states
from .masters import publish

__all__ = ["load", "save"]


def save(module: mx.mod.Module, fname: str) -> None:
    """What ``Module.save_optimizer_states`` does."""
    devices = len(module._context)
    found = states.collect(
        module._state.state_dict(),
        module._optimizer,
        {key // devices: state for key, state in module._updater.states.items() if key % devices == 0},
        {module._param_names.index(name): masters[0] for name, masters in module._core.masters.items()},
        _shapes(module),
    )
    states.write(fname, found._replace(progress=_rekey(found.progress, lambda key: key // devices)))


def load(module: mx.mod.Module, fname: str) -> None:
    """What ``Module.load_optimizer_states`` does."""
    devices = len(module._context)
    found = states.read(fname)
    commit = states.apply_states(found, module._optimizer, _shapes(module), [c.device_id for c in module._context])
    if found.step is not None:
        module._state.load_state_dict(found.step)
    commit()
    _spread(module._optimizer, devices)
    module._updater.states = {
        index * devices + k: states.to_device(state, ctx)
        for index, state in found.states.items()
        for k, ctx in enumerate(module._context)
    }
    module._updater.states_synced = dict.fromkeys(module._updater.states, True)
    arrays = module._arrays()
    for index, value in found.masters.items():
        name = module._param_names[index]
        for master, low in zip(module._core.masters.get(name, ()), arrays[name]):
            master[:] = mx.nd.array(value)
            publish(master, low)
    module._params_dirty = True


def _shapes(module: mx.mod.Module) -> list[tuple]:
    return [module._arg_params[name].shape for name in module._param_names]


def _rekey(progress: dict, new: Any) -> dict:
    """Progress of an optimizer with the keys of its per-weight entries changed."""
    out = {}
    for name, value in progress.items():
        if name == "_all_index_update_counts":
            value = {device: {new(k): n for k, n in counts.items()} for device, counts in value.items()}
        elif isinstance(value, dict) and value and all(isinstance(k, int) for k in value):
            value = {new(k): v for k, v in value.items()}
        out[name] = value
    return out


def _spread(optimizer: mx.optimizer.Optimizer, devices: int) -> None:
    """Module numbers weight ``i`` on device ``k`` as ``i * devices + k``."""
    counts: dict = next(iter(optimizer._all_index_update_counts.values()), {})
    wide = {i * devices + k: n for i, n in counts.items() for k in range(devices)}
    optimizer._all_index_update_counts = {d: dict(wide) for d in optimizer._all_index_update_counts}
    optimizer._index_update_count = optimizer._all_index_update_counts[0]
