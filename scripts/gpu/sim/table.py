"""The table of instructions: of each form its modifiers, its results and inputs by name, and what it does, in C.

    row("FADD", "FTZ? RM|RP|RZ:round=RN SAT?", "float d <- float a, float b", "d = SAT(FTZ(add_$round(a, b)));")

Modifiers stand in the order in which nvdisasm prints them. ``FTZ?`` may be there, and ``$FTZ`` is then 1, else 0;
``RM|RP|RZ:round=RN`` is one of them or the default, and one must be there where there is no default. Results stand left
of the arrow; ``?`` marks operands that may be left out. What an instruction has and no row names is an error.

Types of operands: see ``emit.py``. A row without C is control flow or works across lanes: ``threads.py``, ``warps.py``.
"""

from __future__ import annotations

import re
from string import Template
from typing import NamedTuple

from .decode import (
    Address,
    Constant,
    Global,
    Instruction,
    Integer,
    Literal,
    Name,
    Operand,
    Predicate,
    Register,
    UnknownInstructionError,
)

# Of each type of operand: what it may be, and what may stand before it.
VALUE = (Register, Constant, Integer, Global)
NUMBER = (Register, Constant, Literal)
SIGNS = ("", "-", "|", "-|")
TYPES: dict[str, tuple[tuple[type, ...], tuple[str, ...]]] = {
    "u32": (VALUE, ("",)),
    "neg": (VALUE, ("", "-")),
    "inv": (VALUE, ("", "~")),
    "addend": (VALUE, ("", "-")),  # u64: carries stand above the 32 bits; -x is ~x + 1
    "carried": (VALUE, ("", "~")),  # the same where a carry comes in
    "part": ((Register, Constant, Integer), ("",)),  # u32, or a byte or half of it: R4.B1
    "u64": ((Register, Constant), ("",)),
    "neg64": ((Register, Constant), ("", "-")),
    "quad": ((Register,), ("",)),
    "float": (NUMBER, SIGNS),
    "double": (NUMBER, SIGNS),
    "half": (NUMBER, SIGNS),
    "halves": (NUMBER, SIGNS),
    "pred": ((Predicate,), ("", "!")),
    "imm": ((Integer,), ("",)),
    "zero": ((Integer, Register), ("",)),  # 0x0 or RZ
    "true": ((Predicate,), ("",)),  # PT
    "global": ((Address,), ("",)),
    "shared": ((Address,), ("",)),
    "local": ((Address,), ("",)),
    "constant": ((Constant,), ("",)),
    "special": ((Name,), ("",)),
    "preds": ((Name,), ("",)),  # PR: the seven predicates
    "barrier": ((Name,), ("",)),  # B0
    "hint": ((Name, Integer), ("",)),  # has no effect here
}
UNIFORM = {"S2UR", "R2UR", "VOTEU", "REDUX"}  # and all of the uniform datapath: UMOV and so on


class Spec(NamedTuple):
    type: str
    name: str
    optional: bool


class Slot(NamedTuple):
    choices: tuple[str, ...]
    name: str
    default: str | None  # None: one of the choices must be there


class Row(NamedTuple):
    opcode: str
    slots: tuple[Slot, ...]
    results: tuple[Spec, ...]
    inputs: tuple[Spec, ...]
    c: str | None


class Operation(NamedTuple):
    """An instruction of which everything is named. Operands that were left out are None."""

    instruction: Instruction
    row: Row
    modifiers: dict[str, str]
    operands: dict[str, Operand | None]
    uniform: bool

    @property
    def c(self) -> str:
        """What it does, in C."""
        return Template(self.row.c or "").substitute(self.modifiers)


TABLE: dict[str, list[Row]] = {}


def row(opcode: str, modifiers: str, operands: str, c: str | None = None) -> None:
    results, _, inputs = operands.rpartition("<-")
    made = Row(opcode, tuple(map(_slot, modifiers.split())), _specs(results), _specs(inputs), c)
    TABLE.setdefault(opcode, []).append(made)


def _slot(text: str) -> Slot:
    if text.endswith("?"):
        return Slot((text[:-1],), text[:-1], "0")
    found = re.fullmatch(r"([\w|]+)(?::(\w+))?(?:(=)(\w*))?", text)
    assert found, text
    return Slot(tuple(found[1].split("|")), found[2] or found[1], found[4] if found[3] else None)


def _specs(text: str) -> tuple[Spec, ...]:
    found = [part.split() for part in text.split(",") if part.strip()]
    assert all(kind in TYPES for kind, _ in found), text
    return tuple(Spec(kind, name.rstrip("?"), name.endswith("?")) for kind, name in found)


def operation(instruction: Instruction) -> Operation:
    """The instruction as the table has it. UnknownInstructionError says what the table does not name."""
    opcode = instruction.opcode
    twin = opcode not in TABLE and opcode[0] == "U" and opcode[1:] in TABLE  # the same in the uniform datapath
    rows = TABLE.get(opcode[1:] if twin else opcode)
    if rows is None:
        raise UnknownInstructionError(f"{instruction.text}: the table has no {opcode}")
    for each in rows:
        modifiers = _modifiers(each.slots, instruction.modifiers)
        operands = _operands(each.results + each.inputs, instruction.operands)
        if modifiers is not None and operands is not None:
            return Operation(instruction, each, modifiers, operands, twin or opcode in UNIFORM)
    raise UnknownInstructionError(f"{instruction.text}: no row of {opcode} has these modifiers and operands")


def _modifiers(slots: tuple[Slot, ...], found: tuple[str, ...]) -> dict[str, str] | None:
    named: dict[str, str] = {}
    rest = list(found)
    for slot in slots:
        if rest and rest[0] in slot.choices:
            value = rest.pop(0)
            named[slot.name] = "1" if slot.default == "0" else value
        elif slot.default is None:
            return None
        else:
            named[slot.name] = slot.default
    return None if rest else named


def _operands(specs: tuple[Spec, ...], found: tuple[Operand, ...]) -> dict[str, Operand | None] | None:
    if not specs:
        return None if found else {}
    spec = specs[0]
    if found and _fits(spec.type, found[0]):
        rest = _operands(specs[1:], found[1:])
        if rest is not None:
            return {spec.name: found[0], **rest}
    if spec.optional:
        rest = _operands(specs[1:], found)
        if rest is not None:
            return {spec.name: None, **rest}
    return None


def _fits(kind: str, operand: Operand) -> bool:
    kinds, prefixes = TYPES[kind]
    body = operand.body
    if not isinstance(body, kinds) or operand.prefix not in prefixes:
        return False
    if isinstance(body, Literal):
        return not body.halves or kind == "halves"
    if isinstance(body, (Register, Constant)) and body.selector:
        parts = {"part": ("B0", "B1", "B2", "B3", "H0", "H1")}
        parts["half"] = parts["halves"] = ("H0_H0", "H1_H1")
        return body.selector in parts.get(kind, ())
    if isinstance(body, Address):
        scales = {"global": ("", "64"), "shared": ("", "X4", "X8", "X16"), "local": ("",)}[kind]
        unseen = kind == "global" and (len(body.terms) > 1 or any(term.uniform for term in body.terms))
        return not unseen and all(term.selector in scales for term in body.terms)
    if kind == "zero":
        return body in (Integer(0), Register(False, None))
    if kind == "true":
        return body == Predicate(False, None)
    if kind == "preds":
        return body == Name("PR")
    return kind != "barrier" or (isinstance(body, Name) and re.fullmatch(r"B\d+", body.text) is not None)


# ---- Integers -------------------------------------------------------------------------------------------------------

LOGIC = "AND|OR|XOR:logic"  # how a comparison meets the predicate that comes in
INTEGERS = "F|LT|EQ|LE|GT|NE|GE|T:compare"

row("MOV", "", "u32 d <- u32 a", "d = a;")
row("SEL", "", "u32 d <- u32 a, u32 b, pred p", "d = p ? a : b;")
row("IABS", "", "u32 d <- u32 a", "d = (s32)a < 0 ? 0 - a : a;")
CARRIES = "d = sum; c1 = sum >> 32 >= 1; c2 = sum >> 32 >= 2;"
row(
    *("IADD3", "", "u32 d, pred c1?, pred c2? <- addend a, addend b, addend c"),
    "u64 sum = a + b + c; " + CARRIES,
)
row(
    *("IADD3", "X", "u32 d, pred c1?, pred c2? <- carried a, carried b, carried c, pred x, pred y"),
    "u64 sum = a + b + c + x + y; " + CARRIES,
)
# IMAD.MOV, .SHL and .IADD say what the product is for.
row("IMAD", "MOV|SHL|IADD:use= U32?", "u32 d <- u32 a, u32 b, neg c", "d = a * b + c;")
row("IMAD", "U32? X", "u32 d <- u32 a, u32 b, inv c, pred x", "d = a * b + c + x;")
row("IMAD", "WIDE", "u64 d <- u32 a, u32 b, neg64 c", "d = (s64)(s32)a * (s32)b + c;")
row("IMAD", "HI", "u32 d <- u32 a, u32 b, u64 c", "d = ((s64)(s32)a * (s32)b + c) >> 32;")
PRODUCT = "u128 sum = (u128)((u64)a * b) + c"
row("IMAD", "WIDE U32", "u64 d, pred c1? <- u32 a, u32 b, u64 c", PRODUCT + "; d = sum; c1 = sum >> 64;")
row("IMAD", "WIDE U32 X", "u64 d, pred c1? <- u32 a, u32 b, u64 c, pred x", PRODUCT + " + x; d = sum; c1 = sum >> 64;")
row("IMAD", "HI U32", "u32 d, pred c1? <- u32 a, u32 b, u64 c", PRODUCT + "; d = sum >> 32; c1 = sum >> 64;")
row("IMNMX", "U32:type=S32", "u32 d <- u32 a, u32 b, pred least", "d = ($type(a) < $type(b)) == least ? a : b;")
ISETP = "u8 yes = compare_$compare($type(a), $type(b)); p = logic_$logic(yes, x); q = logic_$logic(!yes, x);"
row("ISETP", f"{INTEGERS} U32:type=S32 {LOGIC}", "pred p, pred q <- u32 a, u32 b, pred x", ISETP)
# Of 64 bits the upper half; the lower half's comparison comes in.
row(
    *("ISETP", f"{INTEGERS} U32:type=S32 {LOGIC} EX", "pred p, pred q <- u32 a, u32 b, pred x, pred low"),
    ISETP.replace("yes = ", "yes = a == b ? low : "),
)
row(
    *("LOP3", "LUT", "pred p?, u32 d <- u32 a, u32 b, u32 c, imm table, pred x"),
    "d = lop3(a, b, c, table); p = d != 0 | x;",
)
row(
    *("PLOP3", "LUT", "pred p, pred q <- pred a, pred b, pred c, imm one, imm other"),
    "u32 at = a << 2 | b << 1 | c; p = one >> at & 1; q = other >> at & 1;",
)
row(
    *("SHF", "L|R:way W? U32|S32|U64|S64:type HI?", "u32 d <- u32 low, u32 by, u32 high"),
    "d = shift_$way(low, by, high, SHIFT_$type, $W) >> 32 * $HI;",
)
row("LEA", "", "u32 d <- neg a, addend b, imm by", "d = (a << by) + b;")
row("LEA", "", "u32 d, pred c1 <- u32 a, addend b, imm by", "u64 sum = (a << by) + b; d = sum; c1 = sum >> 32;")
LEA_HI = "u64 sum = (PAIR(a, high) << by >> 32) + b"
LEA_SX32 = "u32 high = (s32)a >> 31; " + LEA_HI
row("LEA", "HI", "u32 d, pred c1? <- u32 a, addend b, u32 high, imm by", LEA_HI + "; d = sum; c1 = sum >> 32;")
row(
    *("LEA", "HI X", "u32 d, pred c1? <- u32 a, carried b, u32 high, imm by, pred x"),
    LEA_HI + " + x; d = sum; c1 = sum >> 32;",
)
row("LEA", "HI SX32", "u32 d, pred c1? <- u32 a, addend b, imm by", LEA_SX32 + "; d = sum; c1 = sum >> 32;")
row(
    *("LEA", "HI X SX32", "u32 d, pred c1? <- u32 a, carried b, imm by, pred x"),
    LEA_SX32 + " + x; d = sum; c1 = sum >> 32;",
)
row("PRMT", "", "u32 d <- u32 a, u32 select, u32 b", "d = permute(a, select, b);")
row("POPC", "", "u32 d <- u32 a", "d = __builtin_popcount(a);")
row("BREV", "", "u32 d <- u32 a", "d = reverse(a);")
row("BMSK", "", "u32 d <- u32 at, u32 size", "d = bit_mask(at, size);")
row("FLO", "U32:type=S32 SH?", "u32 d <- u32 a", "d = leading_one($type(a) < 0 ? ~a : a, $SH);")
row("SGXT", "U32:type=S32", "u32 d <- u32 a, u32 size", "d = extend_$type(a, size);")
row(
    *("IDP", "2A LO U16|S16:type U8|S8:other", "u32 d <- u32 a, u32 b, u32 c"),
    "d = c + (u32)($type(a) * $other(b)) + (u32)($type(a >> 16) * $other(b >> 8));",
)
row("VABSDIFF", "U32:type=S32", "u32 d <- u32 a, u32 b, u32 c", "d = c + ($type(a) < $type(b) ? b - a : a - b);")
row("P2R", "", "u32 d <- preds p, u32 a, imm mask", "d = a & ~mask | p & mask;")
row("R2P", "", "preds p <- u32 a, imm mask", "p = p & ~mask | a & mask;")

# ---- FP32 and FP64 --------------------------------------------------------------------------------------------------

ROUND = "RM|RP|RZ:round=RN"
COMPARE = "F|LT|EQ|LE|GT|NE|GE|NUM|NAN|LTU|EQU|LEU|GTU|NEU|GEU|T:compare"
SET = "p = logic_$logic(yes, x); q = logic_$logic(!yes, x);"

for opcode, inputs, call in (
    ("FADD", "float a, float b", "add_$round(flush(a, $FTZ), flush(b, $FTZ))"),
    ("FMUL", "float a, float b", "mul_$round(flush(a, $FTZ), flush(b, $FTZ))"),
    ("FFMA", "float a, float b, float c", "fma_$round(flush(a, $FTZ), flush(b, $FTZ), flush(c, $FTZ))"),
):
    row(opcode, f"FTZ? {ROUND} SAT?", f"float d <- {inputs}", f"d = saturate(flush({call}, $FTZ), $SAT);")
row(  # the product times or over 2, 4 or 8, rounded once
    *("FMUL", "FTZ? D2|D4|D8|M2|M4|M8:scale", "float d <- float a, float b"),
    "d = flush((float)((double)flush(a, $FTZ) * flush(b, $FTZ) * SCALE_$scale), $FTZ);",
)
row("FSEL", "FTZ?", "float d <- float a, float b, pred p", "d = flush(p ? a : b, $FTZ);")
row(
    *("FMNMX", "FTZ?", "float d <- float a, float b, pred least"),
    "d = least ? least_of(flush(a, $FTZ), flush(b, $FTZ)) : most_of(flush(a, $FTZ), flush(b, $FTZ));",
)
row(
    *("FSETP", f"{COMPARE} FTZ? {LOGIC}", "pred p, pred q <- float a, float b, pred x"),
    "u8 yes = float_$compare(flush(a, $FTZ), flush(b, $FTZ)); " + SET,
)
row(
    *("FSET", f"BF? {COMPARE} FTZ? {LOGIC}", "u32 d <- float a, float b, pred x"),
    "d = logic_$logic(float_$compare(flush(a, $FTZ), flush(b, $FTZ)), x) ? $BF ? 0x3f800000 : ~0u : 0;",
)
row("FCHK", "", "pred p <- float a, float b", "p = division_is_hard(a, b);")
row("MUFU", "RCP|RSQ|EX2|LG2|SIN|COS:of", "float d <- float a", "d = mufu_$of(a);")
row("MUFU", "RCP64H|RSQ64H:of", "u32 d <- float a", "d = mufu_$of(asu(a));")  # of the upper half of an FP64 number
for opcode, inputs, call in (
    ("DADD", "double a, double b", "add64_$round(a, b)"),
    ("DMUL", "double a, double b", "mul64_$round(a, b)"),
    ("DFMA", "double a, double b, double c", "fma64_$round(a, b, c)"),
):
    row(opcode, ROUND, f"double d <- {inputs}", f"d = {call};")
row(
    *("DSETP", f"{COMPARE} {LOGIC}", "pred p, pred q <- double a, double b, pred x"),
    "u8 yes = float_$compare(a, b); " + SET,
)
# Whether a is the result; and whether both are NaN.
row(
    *("DSETP", "MIN|MAX:way AND", "pred p, pred q <- double a, double b, true x"),
    "p = a == a && (b != b || choose_$way(a, b)); q = a != a && b != b;",
)

# ---- Halves ---------------------------------------------------------------------------------------------------------

row("HADD2", "F32", "float d <- half a, half b", "d = a + b;")
for opcode, inputs, each in (
    ("HADD2", "halves a, halves b", "a.$i + b.$i"),
    ("HMUL2", "halves a, halves b", "a.$i * b.$i"),
):
    both = " | ".join(f"half_RN({each.replace('$i', i)}) << {by}" for i, by in (("low", 0), ("high", 16)))
    row(opcode, "", f"u32 d <- {inputs}", f"d = {both};")
row(
    *("HFMA2", "MMA?", "u32 d <- halves a, halves b, halves c"),
    "d = half_RN((double)a.low * b.low + c.low) | half_RN((double)a.high * b.high + c.high) << 16;",
)
row(
    *("HSETP2", f"{COMPARE} {LOGIC}", "pred p, pred q <- halves a, halves b, pred x"),
    "p = logic_$logic(float_$compare(a.low, b.low), x); q = logic_$logic(float_$compare(a.high, b.high), x);",
)

# ---- Conversions ----------------------------------------------------------------------------------------------------

row("F2FP", f"PACK_AB {ROUND}", "u32 d <- float a, float b", "d = half_$round(a) << 16 | half_$round(b);")
row("F2F", "FTZ? F64 F32", "double d <- float a", "d = flush(a, $FTZ);")
row("F2F", f"FTZ? F32 F64 {ROUND}", "float d <- double a", "d = flush(float_$round(a), $FTZ);")
row("F2F", f"F16 F32 {ROUND}", "u32 d <- float a", "d = half_$round(a);")
row("F2F", f"F16 F64 {ROUND}", "u32 d <- double a", "d = half_$round(a);")
WHOLE = "TRUNC|FLOOR|CEIL:round=RN"
row("FRND", f"FTZ? {WHOLE}", "float d <- float a", "d = whole_$round(flush(a, $FTZ));")
row("FRND", f"F64 {WHOLE}", "double d <- double a", "d = whole_$round(a);")
for words, source, value in (("FTZ?", "float", "flush(a, $FTZ)"), ("F64", "double", "a"), ("F16", "half", "a")):
    first, second = (words, "") if words == "FTZ?" else ("", words)
    for types, result in (("U32:type=S32", "u32"), ("U64|S64:type", "u64")):
        row(  # without NTZ, NaN is the number with the highest bit alone
            *("F2I", f"{first} {types} {second} {WHOLE} NTZ?", f"{result} d <- {source} a"),
            f"d = integer_$type(whole_$round({value}), $NTZ);",
        )
for to, result, call in (("", "float", "float"), ("F64", "double", "double"), ("F16", "u32", "half")):
    for types, source in (("U8|S8|U16|S16|U32:type=S32", "part"), ("U64|S64:type", "u64")):
        if (to, source) != ("F16", "u64"):
            convert = f"{call}_$round((double)$type(a))" if source == "part" else call + "_of_${type}_$round(a)"
            row("I2F", f"{to} {types} {ROUND}", f"{result} d <- {source} a", f"d = {convert};")

# ---- Memory ---------------------------------------------------------------------------------------------------------

ORDER = "CONSTANT? LU? STRONG? SYS|GPU|CTA|SM:scope="  # caching, and who sees it when: here all do at once
PIECES = {"U8": "u32", "S8": "u32", "U16": "u32", "S16": "u32", "": "u32", "64": "u64", "128": "quad"}
for space, suffixes in (("global", ("", "G")), ("shared", ("S",)), ("local", ("L",))):
    for piece, kind in PIECES.items():
        for suffix in suffixes:
            hints = f"E? {piece} {ORDER}"
            row(f"LD{suffix}", hints, f"{kind} d <- {space} at", f"d = load_{piece or 'U32'}(at);")
            row(f"ST{suffix}", hints, f"<- {space} at, {kind} a", f"store_{piece or 'U32'}(at, a);")
for piece, kind in PIECES.items():
    if piece != "128":
        row("LDC", piece, f"{kind} d <- constant at", f"d = load_{piece or 'U32'}(at);")

ATOMIC_ORDER = "STRONG? SYS|GPU|CTA|SM:scope="
for what, kind, new in (
    *(("ADD", "u32", "old + a"), ("ADD 64", "u64", "old + a"), ("EXCH", "u32", "a"), ("EXCH 64", "u64", "a")),
    ("MIN|MAX:way S32:type=U32", "u32", "choose_$way($type(old), $type(a)) ? old : a"),
    ("MIN|MAX:way 64", "u64", "choose_$way(old, a) ? old : a"),
    ("MIN|MAX:way S64", "u64", "choose_$way((s64)old, (s64)a) ? old : a"),
    *(("AND|OR|XOR:logic", "u32", "logic_$logic(old, a)"), ("INC", "u32", "old >= a ? 0 : old + 1")),
    ("ADD F32 FTZ? RN", "u32", "asu(flush(flush(asf(old), $FTZ) + flush(asf(a), $FTZ), $FTZ))"),
    *(("ADD F64 RN", "u64", "asq(asd(old) + asd(a))"), ("ADD F16x2 RN", "u32", "add_halves(old, a)")),
):
    change = f"old = load_{kind.upper()}(at); store_{kind.upper()}(at, {new});"
    for opcode in ("ATOM", "ATOMG"):  # the predicate: whether this memory has such an operation
        row(opcode, f"E? {what} {ATOMIC_ORDER}", f"pred ok, {kind} old <- global at, {kind} a", f"{change} ok = 1;")
    row("RED", f"E? {what} {ATOMIC_ORDER}", f"<- global at, {kind} a", f"{kind} {change}")
    row("ATOMS", what, f"{kind} old <- shared at, {kind} a", change)
for what, kind in (("CAS", "u32"), ("CAS 64", "u64")):
    change = f"old = load_{kind.upper()}(at); store_{kind.upper()}(at, old == a ? b : old);"
    for opcode in ("ATOM", "ATOMG"):
        words = f"pred ok, {kind} old <- global at, {kind} a, {kind} b"
        row(opcode, f"E? {what} {ATOMIC_ORDER}", words, f"{change} ok = 1;")
    row("ATOMS", what, f"{kind} old <- shared at, {kind} a, {kind} b", change)
row(  # says whether it has stored
    *("ATOMS", "CAST SPIN", "u32 done <- shared at, u32 a, u32 b"),
    "done = load_U32(at) == a; if (done) store_U32(at, b);",
)
# All lanes at an address at once; here one after the other. Only where nothing reads the result.
row("ATOMS", "POPC INC 32", "zero none, shared at", "store_U32(at, load_U32(at) + 1);")
row("QSPC", "E S", "pred p <- zero one, global at", "p = at >> 32 == SHARED >> 32;")  # whether it is shared memory

# ---- Special registers, and what has no effect here -----------------------------------------------------------------

row("S2R", "", "u32 d <- special a", "d = a;")
row("S2UR", "", "u32 d <- special a", "d = a;")
row("CS2R", "32", "u32 d <- special a", "d = a;")
row("CS2R", "", "u64 d <- special a", "d = a;")
row("R2UR", "", "u32 d <- u32 a", "d = a;")
row("NOP", "", "", "")
row("YIELD", "", "", "")
row("ERRBAR", "", "", "")
row("MEMBAR", "SC|ALL:order CTA|GPU|SYS:scope", "", "")
row("CCTL", "IVALL", "", "")
row("DEPBAR", "LE", "hint board, hint least, hint others?", "")

# ---- Control flow, and what works across lanes ----------------------------------------------------------------------

row("BRA", "", "pred x?, imm to")
row("BRA", "DIV|CONV:if", "inv mask, imm to")  # where the lanes that run are not, or are, those of the mask
row("CALL", "REL NOINC", "imm to")
row("CALL", "ABS NOINC", "imm to")  # a function of the driver's: ends the process
row("RET", "REL NODEC", "u32 to, zero base")
row("EXIT", "", "pred x?")
row("BSSY", "", "barrier b, imm to")
row("BSYNC", "", "barrier b")
row("BREAK", "", "pred x?, barrier b")
row("WARPSYNC", "", "u32 mask")
row("BAR", "SYNC DEFER_BLOCKING?", "zero number")
row("BAR", "RED AND|OR|POPC:logic", "zero number, pred x")
row("B2R", "RESULT", "u32 count, pred p? <-")
row("SHFL", "IDX|UP|DOWN|BFLY:way", "pred ok, u32 d <- u32 a, u32 lane, u32 clamp")
row("VOTE", "ANY|ALL|EQ:way", "u32 ballot?, pred p <- pred x")
row("VOTEU", "ANY|ALL|EQ:way", "u32 ballot?, pred p <- pred x")
row("REDUX", "SUM|MIN|MAX|AND|OR|XOR:way S32:type=U32", "u32 d <- u32 a")
row("BPT", "TRAP", "imm code?")
row("KILL", "", "")
