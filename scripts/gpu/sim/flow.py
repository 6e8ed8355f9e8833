"""Where control may come in."""

from __future__ import annotations

from .decode import BYTES, Integer
from .table import Operation

JUMPS = {"BRA", "CALL", "BSSY"}
# After these, other lanes may come in, or none.
BREAKS = {"BRA", "CALL", "RET", "EXIT", "KILL", "BPT", "WARPSYNC", "BSYNC", "BREAK", "BAR"}
# What works across the lanes of a warp, or the warps of a block.
TOGETHER = {"SHFL", "VOTE", "VOTEU", "REDUX", "BAR", "B2R", "WARPSYNC", "LDS", "STS", "ATOMS"}


def works_together(operations: list[Operation]) -> bool:
    return any(each.row.opcode in TOGETHER for each in operations)


def returns(operations: list[Operation]) -> bool:
    return any(each.row.opcode == "RET" for each in operations)


def leaders(operations: list[Operation]) -> set[int]:
    """The addresses at which control may come in."""
    found, end = {0}, len(operations) * BYTES
    for each in operations:
        if each.row.opcode in BREAKS:
            found.add(each.instruction.at + BYTES)
        if each.row.opcode in JUMPS and "ABS" not in each.instruction.modifiers:
            found.add(each.operands["to"].body.value)
    if returns(operations):  # to an address that was moved into a register
        moves = [each for each in operations if each.row.opcode in ("MOV", "IMAD")]
        numbers = {part.body.value for each in moves for part in each.instruction.operands if _is_integer(part)}
        found |= {number for number in numbers if number % BYTES == 0}
    return {at for at in found if 0 <= at < end}


def _is_integer(operand: object) -> bool:
    return isinstance(getattr(operand, "body", None), Integer)
