"""nvdisasm's text of machine code -> instructions. Of the text nothing is dropped but ``.reuse``, a hint for speed.

parse(0, "@!P0 FADD.FTZ R1, -R2, |c[0x0][0x168]|")
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import NamedTuple, Union

BYTES = 16  # of one instruction


class UnknownInstructionError(Exception):
    """An instruction, or a part of one, whose meaning nobody has written down."""


class Register(NamedTuple):
    """``R4``, ``URZ`` or ``R2.64``: of a lane, or uniform (``U``); the number of RZ, which reads as 0, is None."""

    uniform: bool
    number: int | None
    selector: str = ""


class Predicate(NamedTuple):
    """``P0`` or ``UPT``; the number of PT, which is true, is None."""

    uniform: bool
    number: int | None


class Constant(NamedTuple):
    """``c[0x0][R4+0x160]``, with the selector of a half where there is one."""

    bank: int
    index: Register | None
    offset: int
    selector: str = ""


class Integer(NamedTuple):
    value: int


class Literal(NamedTuple):
    """A floating-point number, or two halves: the 32 bits that the machine code holds."""

    bits: int
    halves: bool = False


class Address(NamedTuple):
    """``[R2.64+UR4+0x10]``."""

    terms: tuple[Register, ...]
    offset: int


class Global(NamedTuple):
    """One half (0: the lower) of the address of a variable of the module; a relocation puts it there."""

    symbol: str
    half: int


class Name(NamedTuple):
    """``SR_TID.X``, ``PR``, ``B0``, ``{2,1}``."""

    text: str


Body = Union[Register, Predicate, Constant, Integer, Literal, Address, Global, Name]


class Operand(NamedTuple):
    """What stands before it ("", "-", "~", "!", "|" for an absolute value, "-|"), and what it is."""

    prefix: str
    body: Body


class Instruction(NamedTuple):
    at: int
    text: str
    guard: Operand | None
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]


LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;\s*/\*\s*0x([0-9a-f]+)\s*\*/")
GUARD = re.compile(r"@(!?)(UP|P)(\w)\s+(.*)")
REGISTER = re.compile(r"(U?)R(\d+|Z)((?:\.\w+)*)")
PREDICATE = re.compile(r"(U?)P(\d|T)")
CONSTANT = re.compile(r"c\[(0x[0-9a-f]+)\]\[(?:(U?R(?:\d+|Z))\+?)?(-?0x[0-9a-f]+)?\]((?:\.\w+)*)")
INTEGER = re.compile(r"-?0x[0-9a-f]+")
FLOAT = re.compile(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?|INF|QNAN|SNAN)")
ADDRESS = re.compile(r"\[(.*)\]")
NAME = re.compile(r"SR_[\w.]+|SRZ|PR|S?B\d+|\{[\d,]+\}")


def disassembled(nvdisasm: str, code: bytes) -> list[Instruction]:
    """The instructions of one kernel's sm_80 code."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(code)
        file.flush()
        command = [nvdisasm, "-b", "SM80", "-hex", "-ndf", file.name]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = [parse(int(at, 16), words, int(code, 16) >> 32) for at, words, code in LINE.findall(text)]
    if [each.at for each in found] != list(range(0, len(code), BYTES)):
        raise UnknownInstructionError(f"nvdisasm shows {len(found)} instructions of {len(code) // BYTES}")
    return found


def parse(at: int, text: str, literal: int = 0) -> Instruction:
    """One instruction at an address. Floating-point numbers are in ``literal``: text may have fewer digits."""
    words, guard = text.replace(".reuse", "").replace("] [", "]["), None
    found = GUARD.match(words)
    if found:
        guard, words = _operand(f"{found[1]}{found[2]}{found[3]}", 0), found[4]
    opcode, _, rest = words.partition(" ")
    name, *modifiers = opcode.split(".")
    parts = rest.split() if name == "RET" else _split(rest)
    operands: list[Operand] = []
    try:
        while parts:
            if FLOAT.fullmatch(parts[0]) and len(parts) > 1 and FLOAT.fullmatch(parts[1]):
                operands.append(Operand("", Literal(literal, halves=True)))
                del parts[:2]
            else:
                operands.append(_operand(parts.pop(0), literal))
    except UnknownInstructionError as error:
        raise UnknownInstructionError(f"{text}: {error}") from None
    return Instruction(at, text, guard, name, tuple(modifiers), tuple(operands))


def _split(text: str) -> list[str]:
    """At the commas outside braces."""
    return [part.strip() for part in re.split(r",(?![^{]*\})", text) if part.strip()]


def _operand(text: str, literal: int) -> Operand:
    if FLOAT.fullmatch(text) and not INTEGER.fullmatch(text):
        return Operand("", Literal(literal))
    if INTEGER.fullmatch(text):
        return Operand("", Integer(int(text, 16)))
    found = re.fullmatch(r"([-~!]?)(\|?)(.*?)(\|?)((?:\.\w+)*)", text)
    prefix, absolute, words, closing, selector = found.groups() if found else ("", "", text, "", "")
    if absolute != closing:
        raise UnknownInstructionError(f"operand {text}")
    return Operand(prefix + absolute, _body(words + selector))


def _body(text: str) -> Body:
    found = REGISTER.fullmatch(text)
    if found:
        return Register(bool(found[1]), None if found[2] == "Z" else int(found[2]), found[3][1:])
    found = PREDICATE.fullmatch(text)
    if found:
        return Predicate(bool(found[1]), None if found[2] == "T" else int(found[2]))
    found = CONSTANT.fullmatch(text)
    if found:
        index = _body(found[2]) if found[2] else None
        return Constant(int(found[1], 16), index, int(found[3] or "0", 16), found[4][1:])
    found = ADDRESS.fullmatch(text)
    if found:
        terms = [_body(term) for term in found[1].split("+") if not INTEGER.fullmatch(term)]
        offsets = [int(term, 16) for term in found[1].split("+") if INTEGER.fullmatch(term)]
        if all(isinstance(term, Register) for term in terms):
            return Address(tuple(terms), sum(offsets))
    if NAME.fullmatch(text):
        return Name(text)
    raise UnknownInstructionError(f"operand {text}")
