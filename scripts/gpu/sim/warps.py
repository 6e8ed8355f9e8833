"""A kernel whose threads meet -> a function in C for one warp: 32 lanes in lockstep, registers in arrays."""

from __future__ import annotations

from .decode import BYTES, Integer, Name, UnknownInstructionError
from .emit import Registers
from .flow import BREAKS, leaders
from .table import Operation

# What other lanes may see, or what they see of others: all lanes do one before any does the next.
SEEN = {"LD", "LDG", "LDS", "ST", "STG", "STS", "ATOM", "ATOMG", "ATOMS", "RED"}


class Warps(Registers):
    def spelled(self, kind: str, number: int) -> str:
        return f"w->{kind}[{number}]" + ("" if kind.startswith("u") else "[l]")

    def function(self, operations: list[Operation]) -> str:
        starts = leaders(operations)
        lines: list[str] = []
        together: list[str] = []  # what each lane does before the next lane does it

        def lanes_end() -> None:
            if together:
                lines.append("LANES {\n" + "\n".join(together) + "\n}")
                together.clear()

        reachable = False
        for each in operations:
            at = each.instruction.at
            if at in starts:
                lanes_end()
                if reachable:
                    lines.append(f"LANES w->at[l] = {at:#x}; break;")
                lines.append(f"case {at:#x}:")
                reachable = True
            if not reachable:
                continue
            if each.row.c is not None and not each.uniform and each.row.opcode not in SEEN:
                together.append(self.guarded(each, self.statement(each)))
                continue
            lanes_end()
            lines.append(self.line(each))
            reachable = each.row.opcode not in BREAKS
        lanes_end()
        return "\n".join(
            [
                "static void run(Warp *w, Block *block) {",
                "u32 can;",
                "while ((can = runnable(w))) {",
                "u32 at = ~0u, active = 0;",
                "for (u32 l = 0; l < 32; l++) if ((can >> l & 1) && w->at[l] < at) at = w->at[l];",
                "for (u32 l = 0; l < 32; l++) active |= (u32)((can >> l & 1) && w->at[l] == at) << l;",
                "switch (at) {",
                *lines,
                'default: STOP("an address"); }',
                "}",
                "}",
            ]
        )

    def line(self, operation: Operation) -> str:
        """What all active lanes do."""
        opcode, operands = operation.row.opcode, operation.operands
        guard = self.condition(operation.instruction.guard)
        after = operation.instruction.at + BYTES
        if operation.row.c is not None:
            line = self.guarded(operation, self.statement(operation))
            if operation.uniform:  # once, by the first lane
                return f"{{ const u32 l = __builtin_ctz(active); (void)l; {line} }}"
            return f"LANES {line}"
        if opcode in BREAKS:
            return self.flow(operation, guard, after)
        if opcode == "BSSY":
            return f"LANES if ({guard}) {self.barrier(operation)} = active;"
        if opcode == "SHFL":
            ok, d = (self.write(spec, operands[spec.name]) for spec in operation.row.results)
            a, lane, clamp = (self.value("u32", operands[name]) for name in ("a", "lane", "clamp"))
            way = operation.modifiers["way"]
            return (
                f"{{ u32 values[32], lanes[32], clamps[32], of = 0; "
                f"LANES if ({guard}) {{ of |= 1u << l; values[l] = {a}; lanes[l] = {lane}; clamps[l] = {clamp}; }} "
                f"for (u32 l = 0; l < 32; l++) if (of >> l & 1) {{ u8 ok; "
                f"u32 from = shuffle({way}, l, lanes[l], clamps[l], &ok), d = values[of >> from & 1 ? from : l]; "
                f"(void)ok; (void)d;{ok}{d} }} }}"
            )
        if opcode in ("VOTE", "VOTEU"):
            ballot, p = (self.write(spec, operands[spec.name]) for spec in operation.row.results)
            each = "u32 l = 0; (void)l;" if opcode == "VOTEU" else "for (u32 l = 0; l < 32; l++) if (of >> l & 1)"
            return (
                f"{{ u32 ballot = 0, of = 0; "
                f"LANES if ({guard}) {{ of |= 1u << l; ballot |= (u32)({self.condition(operands['x'])}) << l; }} "
                f"const u8 p = vote_{operation.modifiers['way']}(ballot, of); (void)p; {each} {{{ballot}{p} }} }}"
            )
        if opcode == "REDUX":
            kind = {"U32": "u32", "S32": "s32"}[operation.modifiers["type"]]
            a, d = self.value("u32", operands["a"]), self.write(operation.row.results[0], operands["d"])
            return (
                f"{{ {kind} d = 0; int first = 1; LANES if ({guard}) {{ const {kind} a = {a}; "
                f"d = first ? a : reduce_{operation.modifiers['way']}(d, a); first = 0; }}{d} }}"
            )
        if opcode == "B2R":
            count, p = (self.write(spec, operands[spec.name]) for spec in operation.row.results)
            return f"LANES if ({guard}) {{ u32 count = block->counted; u8 p = block->reduced; (void)p;{count}{p} }}"
        raise UnknownInstructionError(f"{operation.instruction.text}: lanes in lockstep cannot do it")

    def flow(self, operation: Operation, guard: str, after: int) -> str:
        """What says where each lane goes on."""
        opcode, operands, at = operation.row.opcode, operation.operands, operation.instruction.at
        if opcode in ("KILL", "BPT") or "ABS" in operation.instruction.modifiers:
            return f'LANES {{ if ({guard}) STOP("{operation.instruction.text}"); w->at[l] = {after:#x}; }} break;'
        if opcode in ("BRA", "CALL"):
            to = operands["to"].body
            assert isinstance(to, Integer)
            condition = f"{guard} && {self.condition(operands.get('x'))}"
            if "if" in operation.modifiers:
                same = f"({self.value('inv', operands['mask'])} & ~w->exited) == active"
                condition = f"{guard} && {'!' if operation.modifiers['if'] == 'DIV' else ''}({same})"
            return f"LANES w->at[l] = {condition} ? {to.value:#x} : {after:#x}; break;"
        if opcode == "RET":
            return f"LANES w->at[l] = {guard} ? {self.value('u32', operands['to'])} : {after:#x}; break;"
        if opcode == "EXIT":
            condition = f"{guard} && {self.condition(operands['x'])}"
            return f"LANES {{ if ({condition}) w->exited |= 1u << l; else w->at[l] = {after:#x}; }} break;"
        if opcode == "BREAK":
            then = f"leave(w, {self.number_of(operation)}, l);"
            guard = f"{guard} && {self.condition(operands['x'])}"
        elif opcode == "BSYNC":
            then = f"wait_for(w, l, {at:#x}, {self.number_of(operation)}, 0);"
        elif opcode == "WARPSYNC":
            then = f"wait_for(w, l, {at:#x}, BY_MASK, {self.value('u32', operands['mask'])});"
        else:
            then = "w->at_barrier |= 1u << l;"
            if "logic" in operation.modifiers:
                x = self.condition(operands["x"])
                then += f" block->all &= {x}; block->any |= {x}; block->count += {x};"
                then += f" block->kind = BAR_{operation.modifiers['logic']};"
        return f"LANES {{ w->at[l] = {after:#x}; if ({guard}) {{ {then} }} }} release(w); break;"

    def number_of(self, operation: Operation) -> int:
        body = operation.operands["b"].body
        assert isinstance(body, Name)
        return int(body.text[1:])

    def barrier(self, operation: Operation) -> str:
        return f"w->barrier[{self.number_of(operation)}][l]"
