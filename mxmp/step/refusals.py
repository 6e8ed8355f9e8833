"""What every door refuses: above all what would apply or change gradients before they are checked."""

from __future__ import annotations

from numbers import Real
from typing import Any

__all__ = ["OTHER_WORKERS", "check_kvstore", "check_positive", "refuse_compression", "refuse_sparse_weight"]

# Why the policy of a distributed job cannot change while it trains.
OTHER_WORKERS = (
    "each worker sees batches of its own, and would move layers of its own: guard a run with one worker, and give "
    "its policy to all"
)


def check_kvstore(kvstore: Any, update_on_kvstore: bool | None = None) -> None:
    """Raise ``ValueError`` for a kvstore, by name or object, that updates weights itself."""
    if update_on_kvstore:
        raise ValueError(
            "update_on_kvstore=True applies gradients before they are checked, so an overflow would reach the "
            "weights: leave it None or False"
        )
    kind = kvstore if isinstance(kvstore, str) else getattr(kvstore, "type", "")
    if "async" in kind.lower():
        raise ValueError(
            f"kvstore {kind!r} applies each worker's gradients on the server, before any check: use 'dist_sync'"
        )


def check_positive(name: str, value: Any) -> None:
    """Raise ``ValueError`` for what is no number above 0, NumPy's included."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")


def refuse_compression(compression_params: Any) -> None:
    """Raise ``ValueError`` for any gradient compression."""
    if compression_params is not None:
        raise ValueError(
            f"compression_params={compression_params!r}: 2-bit compression compares scaled gradients with its "
            "threshold, which loses its meaning whenever the scale changes; leave it None (float16 parameters "
            "already halve the traffic)"
        )


def refuse_sparse_weight(name: str, storage: str) -> None:
    """Raise ``ValueError`` where a parameter's weights are not dense."""
    if storage != "default":
        raise ValueError(
            f"parameter {name!r} has {storage} weights, which MXNet updates on the kvstore only, before any check: "
            "use dense weights (sparse_grad=False)"
        )
