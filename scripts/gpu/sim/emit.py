"""One operation of the table -> C. ``threads.py`` and ``warps.py`` spell the registers, and do control flow."""

from __future__ import annotations

from .decode import (
    Address,
    Constant,
    Global,
    Integer,
    Literal,
    Name,
    Operand,
    Predicate,
    Register,
    UnknownInstructionError,
)
from .table import Operation, Spec

# Of each type of operand: the type of its variable in C. Those without one are not read.
C_TYPES = dict.fromkeys(("u32", "neg", "inv", "part", "imm", "special", "preds"), "u32")
C_TYPES.update(dict.fromkeys(("addend", "carried", "u64", "neg64", "global", "shared", "local", "constant"), "u64"))
C_TYPES.update(quad="quad", float="float", double="double", half="float", halves="halves", pred="u8")
SPECIAL = {f"SR_{name}.{axis}": f"{name}_{axis}" for name in ("TID", "CTAID") for axis in "XYZ"}
SPECIAL.update(
    {
        "SR_LANEID": "LANE",
        "SR_EQMASK": "(1u << LANE)",
        "SR_LTMASK": "((1u << LANE) - 1)",
        "SR_LEMASK": "((2u << LANE) - 1)",
        "SR_GEMASK": "~((1u << LANE) - 1)",
        "SR_GTMASK": "~((2u << LANE) - 1)",
        "SR_SWINHI": "(u32)(SHARED >> 32)",
        "SR_SWINLO": "0u",
        "SRZ": "0u",
    }
)
LOCAL_WINDOW = (0x20, 0x24)  # in bank 0: where generic addresses of local memory start


class Registers:
    """What a kernel names, and how that is spelled in C."""

    def __init__(self) -> None:
        self.lanes: set[int] = set()
        self.uniform: set[int] = set()
        self.globals: set[str] = set()
        self.banks: set[int] = {0}

    def register(self, uniform: bool, number: int) -> str:
        (self.uniform if uniform else self.lanes).add(number)
        return self.spelled("ur" if uniform else "r", number)

    def predicate(self, uniform: bool, number: int) -> str:
        return self.spelled("up" if uniform else "p", number)

    def spelled(self, kind: str, number: int) -> str:
        """An lvalue: of kind ``r``, ``ur``, ``p`` or ``up``."""
        raise NotImplementedError

    # -- Reading --

    def word(self, body: object, add: int = 0) -> str:
        """32 bits of an operand, or those that many words above them."""
        if isinstance(body, Register):
            return "0u" if body.number is None else self.register(body.uniform, body.number + add)
        if isinstance(body, Integer):
            return f"{body.value & 0xFFFFFFFF:#x}u"
        if isinstance(body, Global):
            self.globals.add(body.symbol)
            return f"(u32)((u64)global_{body.symbol} >> {32 * body.half})"
        assert isinstance(body, Constant), body
        if body.bank == 0 and body.index is None and body.offset + 4 * add in LOCAL_WINDOW:
            return f"(u32)((u64)LOCAL >> {32 * LOCAL_WINDOW.index(body.offset + 4 * add)})"
        return f"load_U32({self.constant(body, 4 * add)})"

    def pair(self, body: object) -> str:
        return f"PAIR({self.word(body)}, {self.word(body, 1)})"

    def constant(self, body: Constant, add: int = 0) -> str:
        """The address of a constant in the host's memory."""
        self.banks.add(body.bank)
        offset = f"{body.offset + add:#x}"
        return f"(u64)(bank{body.bank} + {f'(u32)({self.word(body.index)} + {offset})' if body.index else offset})"

    def address(self, body: Address, kind: str) -> str:
        terms = [f"(s64){body.offset}"] if body.offset else []
        for term in body.terms:
            if term.number is not None:
                scale = f" * {term.selector[1:]}u" if term.selector.startswith("X") else ""
                terms.append(self.pair(term) if kind == "global" else f"({self.word(term)}{scale})")
        total = " + ".join(terms) or "0"
        return total if kind == "global" else f"(u64){kind.upper()} + (u32)({total})"

    def condition(self, operand: Operand | None) -> str:
        """A predicate's value; where there is none, 1."""
        if operand is None:
            return "1"
        assert isinstance(operand.body, Predicate), operand
        number, negated = operand.body.number, operand.prefix == "!"
        value = "1" if number is None else self.predicate(operand.body.uniform, number)
        return f"!{value}" if negated else value

    def value(self, kind: str, operand: Operand | None) -> str:
        """An operand's value, of the type that ``C_TYPES`` has for its kind."""
        if kind == "pred" or operand is None:
            return self.condition(operand)
        body, prefix = operand.body, operand.prefix
        if kind in ("u32", "imm"):
            return self.word(body)
        if kind == "neg":
            return f"0u - {self.word(body)}" if prefix else self.word(body)
        if kind == "inv":
            return f"~{self.word(body)}" if prefix else self.word(body)
        if kind == "addend":
            return f"(u64)~{self.word(body)} + 1" if prefix else self.word(body)
        if kind == "carried":
            return f"(u64)(u32)~{self.word(body)}" if prefix else self.word(body)
        if kind == "part":
            part = getattr(body, "selector", "")
            return f"{self.word(body)} >> {int(part[1]) * {'B': 8, 'H': 16}[part[0]]}" if part else self.word(body)
        if kind in ("u64", "neg64"):
            return f"0 - {self.pair(body)}" if prefix else self.pair(body)
        if kind == "quad":
            return f"(quad){{{{{', '.join(self.word(body, i) for i in range(4))}}}}}"
        if kind in ("global", "shared", "local"):
            return self.address(body, kind)
        if kind == "constant":
            return self.constant(body)
        if kind == "special":
            if not isinstance(body, Name) or body.text not in SPECIAL:
                raise UnknownInstructionError(f"special register {body}")
            return SPECIAL[body.text]
        if kind == "preds":
            return " | ".join(f"(u32){self.predicate(False, i)} << {i}" for i in range(7))
        return self.number(kind, operand)

    def number(self, kind: str, operand: Operand) -> str:
        """A floating-point operand."""
        body, prefix = operand.body, operand.prefix
        if kind == "double":
            bits = f"{body.bits << 32:#x}ull" if isinstance(body, Literal) else self.pair(body)
            return f"asd({_signed(bits, prefix, 0x8000000000000000)})"
        bits = f"{body.bits:#x}u" if isinstance(body, Literal) else self.word(body)
        if kind == "float":
            return f"asf({_signed(bits, prefix, 0x80000000)})"
        selector = getattr(body, "selector", "")
        picks = {"H0_H0": (0, 0), "H1_H1": (1, 1)}.get(selector, (0, 1))
        low, high = (f"to_float({_signed(f'({bits} >> {16 * i} & 0xffff)', prefix, 0x8000)})" for i in picks)
        return low if kind == "half" else f"(halves){{{low}, {high}}}"

    # -- Writing --

    def write(self, spec: Spec, operand: Operand | None) -> str:
        """Statements that write a result's variable to its registers."""
        if spec.type == "preds":
            return "".join(f" {self.predicate(False, i)} = {spec.name} >> {i} & 1;" for i in range(7))
        body = operand.body if operand else None
        if body is None or body.number is None:
            return ""
        if spec.type == "pred":
            return f" {self.predicate(body.uniform, body.number)} = {spec.name};"
        words = {
            "u32": [spec.name],
            "float": [f"asu({spec.name})"],
            "u64": [spec.name, f"{spec.name} >> 32"],
            "double": [f"asq({spec.name})", f"asq({spec.name}) >> 32"],
            "quad": [f"{spec.name}.word[{i}]" for i in range(4)],
        }[spec.type]
        return "".join(f" {self.register(body.uniform, body.number + i)} = {word};" for i, word in enumerate(words))

    def statement(self, operation: Operation) -> str:
        """What an operation of the table does, in a block of its own; nothing for those that do nothing."""
        row, operands = operation.row, operation.operands
        if not operation.c:
            return ""
        inputs = [
            f"const {C_TYPES[spec.type]} {spec.name} = {self.value(spec.type, operands[spec.name])};"
            for spec in row.inputs
            if spec.type in C_TYPES
        ]
        results = [f"{C_TYPES[spec.type]} {spec.name}{self._before(spec)};" for spec in row.results]
        writes = "".join(self.write(spec, operands[spec.name]) for spec in row.results)
        return f"{{ {' '.join([*inputs, *results])} {operation.c}{writes} }}"

    def _before(self, spec: Spec) -> str:
        """A result of which some bits stay as they are starts from what it was."""
        return f" = {self.value('preds', Operand('', Name('PR')))}" if spec.type == "preds" else ""

    def guarded(self, operation: Operation, statement: str) -> str:
        guard = operation.instruction.guard
        return f"if ({self.condition(guard)}) {statement}" if guard and statement else statement


def _signed(bits: str, prefix: str, sign: int) -> str:
    """Bits of which the sign is cleared, flipped or both."""
    suffix = "ull" if sign > 0xFFFFFFFF else "u"
    if "|" in prefix:
        bits = f"({bits} & {sign - 1:#x}{suffix})"
    return f"({bits} ^ {sign:#x}{suffix})" if "-" in prefix else bits
