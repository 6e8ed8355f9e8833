"""What to say of a block that is traced again and again."""

from __future__ import annotations

_KEPT = (
    "which is traced at its first call, and only the last ones are kept. Pass a number that changes as an input, an "
    "array (mx.nd.array([0.3]))"
)


def slow(why: str, block: str, what: str | None, limit: int) -> str:
    """Return the warning of a block, by the reason: ``what`` its code does, or reads, in more than ``limit`` ways."""
    texts = {
        "always anew": f"the code of {block!r} or a block inside {what}, so it is traced anew in each call, which is "
        "slow. Draw random numbers and compute with arrays in the graph (F.random.uniform, F.where), and assign new "
        "values to attributes",
        "many values": f"{what!r}, which the code of {block!r} reads, had more than {limit} values. Each has a graph "
        f"of its own, {_KEPT}",
        "many shapes": f"{block!r} was called with more than {limit} inputs of different shapes, which its code reads. "
        f"Each has a graph of its own, {_KEPT}",
        "many arguments": f"{block!r} was called with more than {limit} different values. Each has a graph of its own, "
        f"{_KEPT}",
    }
    return f"{texts[why]}, or leave the block as Python: mxmp.convert(net, exclude=...)"
