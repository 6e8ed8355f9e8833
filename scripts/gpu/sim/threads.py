"""A kernel whose threads know nothing of each other -> a function in C for one thread, with registers in locals."""

from __future__ import annotations

from .decode import Integer, UnknownInstructionError
from .emit import Registers
from .flow import leaders, returns
from .table import Operation


class Threads(Registers):
    def spelled(self, kind: str, number: int) -> str:
        return f"{kind}{number}"

    def function(self, operations: list[Operation]) -> str:
        starts = leaders(operations)
        lines = []
        for each in operations:
            at = each.instruction.at
            lines += [f"L{at:x}:;"] * (at in starts) + [self.guarded(each, self.line(each))]
        lines.append('STOP("the end of the code");')
        if returns(operations):
            cases = " ".join(f"case {at:#x}: goto L{at:x};" for at in sorted(starts))
            lines.append(f'RETURN: switch (to) {{ {cases} default: STOP("a return address"); }}')
        names = [f"r{i}" for i in sorted(self.lanes)] + [f"ur{i}" for i in sorted(self.uniform)] + ["to"]
        predicates = [f"{kind}{i}" for kind in ("p", "up") for i in range(7)]
        return "\n".join(
            [
                "static void thread(const u8 *bank0, const u32 *ctaid, const u32 *tid, u32 lane, u8 *LOCAL) {",
                f"u32 {', '.join(f'{name} = 0' for name in names)};",
                f"u8 {', '.join(f'{name} = 0' for name in predicates)};",
                *lines,
                "}",
            ]
        )

    def line(self, operation: Operation) -> str:
        if operation.row.c is not None:
            return self.statement(operation)
        opcode, operands = operation.row.opcode, operation.operands
        if opcode in ("BSSY", "BSYNC", "BREAK"):  # one thread waits for nobody
            return ""
        if opcode == "EXIT":
            return f"if ({self.condition(operands['x'])}) return;"
        if opcode == "RET":
            return f"{{ to = {self.value('u32', operands['to'])}; goto RETURN; }}"
        if opcode in ("BPT", "KILL") or "ABS" in operation.instruction.modifiers:
            return f'STOP("{operation.instruction.text}");'
        if opcode in ("BRA", "CALL") and "if" not in operation.modifiers:
            to = operands["to"].body
            assert isinstance(to, Integer)
            return f"if ({self.condition(operands.get('x'))}) goto L{to.value:x};"
        raise UnknownInstructionError(f"{operation.instruction.text}: a thread alone cannot do it")
