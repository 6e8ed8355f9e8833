"""What must have happened to a module before a call."""

from __future__ import annotations

import mxnet as mx

__all__ = ["require"]


def require(module: mx.mod.BaseModule, *, optimizer: bool) -> None:
    """Raise ``RuntimeError`` before ``bind``, ``init_params`` and, where ``optimizer`` is due, ``init_optimizer``."""
    done = {
        "bind": module.binded,
        "init_params": module.params_initialized,
        "init_optimizer": module.optimizer_initialized or not optimizer,
    }
    missing = [f"{name}()" for name, so in done.items() if not so]
    if missing:
        raise RuntimeError(
            f"call {' and '.join(missing)} first: bind(), init_params(), init_optimizer(), as fit() does"
        )
