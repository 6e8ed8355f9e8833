"""Each instruction of the table against its definition, written here once more: on edges and on random operands."""

from __future__ import annotations

import itertools
import math
import shutil
from fractions import Fraction
from typing import Callable, Iterator

import pytest
from gpu.sim import table
from gpu.sim.decode import UnknownInstructionError, parse
from gpu.sim.table import TABLE, operation
from gpu.sim.threads import Threads

from .bench import BEFORE, EDGES_16, Sample, run, samples
from .exact import FORMATS, Number, add, bits, flushed, multiply, number, saturated, whole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
LITERALS = {"1.5": 0x3FC00000, "2.25": 0x40020000, "0.5, 3": 0x42003800}
ROUNDS = ("", ".RM", ".RP", ".RZ")
Model = Callable[[Sample], dict]
CASES: dict[str, tuple[str, Model]] = {}


def case(text: str, model: Model, kind: str = "u32") -> None:
    """An instruction, and what it leaves: "r0", "r1", "p0", "p6", "memory"; floats also as "f32", "f64", "f16x2"."""
    CASES[text] = (kind, model)


def signed(x: int, width: int = 32) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


def pair(s: Sample, i: int) -> int:
    return s.r[i] | s.r[i + 1] << 32


# ---- Integers -------------------------------------------------------------------------------------------------------

case("MOV R0, R2", lambda s: {"r0": s.r[2]})
case("MOV R0, 0x1234", lambda s: {"r0": 0x1234})
case("MOV R0, c[0x0][0x8]", lambda s: {"r0": int.from_bytes(s.memory[8:12], "little")})
case("UMOV UR4, 0x7", lambda s: {})
case("@P1 MOV R0, R2", lambda s: {"r0": s.r[2]} if s.p[1] else {})
case("@!P1 MOV R0, R2", lambda s: {} if s.p[1] else {"r0": s.r[2]})
case("MOV RZ, R2", lambda s: {})
case("SEL R0, R2, R4, !P1", lambda s: {"r0": s.r[4] if s.p[1] else s.r[2]})
case("SEL R0, R2, -0x1, P1", lambda s: {"r0": s.r[2] if s.p[1] else M32})
case("IABS R0, R2", lambda s: {"r0": abs(signed(s.r[2])) & M32})


def sum3(total: int) -> dict:
    return {"r0": total & M32, "p0": int(total >> 32 >= 1), "p6": int(total >> 32 >= 2)}


case("IADD3 R0, P0, P6, R2, R4, R6", lambda s: sum3(s.r[2] + s.r[4] + s.r[6]))
case("IADD3 R0, R2, -R4, R6", lambda s: {"r0": (s.r[2] - s.r[4] + s.r[6]) & M32})
case("IADD3 R0, R2, 0x5, RZ", lambda s: {"r0": (s.r[2] + 5) & M32})
# A carry of a difference says that nothing was borrowed.
case("IADD3 R0, P0, R2, -R4, RZ", lambda s: {"r0": (s.r[2] - s.r[4]) & M32, "p0": int(s.r[2] >= s.r[4])})
case("IADD3.X R0, P0, P6, R2, R4, R6, P1, P2", lambda s: sum3(s.r[2] + s.r[4] + s.r[6] + s.p[1] + s.p[2]))
case("IADD3.X R0, R2, ~R4, RZ, P1, !PT", lambda s: {"r0": (s.r[2] - s.r[4] - 1 + s.p[1]) & M32})
case("IMAD R0, R2, R4, -R6", lambda s: {"r0": (s.r[2] * s.r[4] - s.r[6]) & M32})
case("IMAD.MOV.U32 R0, RZ, RZ, R6", lambda s: {"r0": s.r[6]})
case("IMAD.SHL.U32 R0, R2, 0x8, RZ", lambda s: {"r0": s.r[2] << 3 & M32})
case("IMAD.X R0, R2, R4, ~R6, P1", lambda s: {"r0": (s.r[2] * s.r[4] + (~s.r[6] & M32) + s.p[1]) & M32})


def words(value: int) -> dict:
    return {"r0": value & M32, "r1": value >> 32 & M32}


case("IMAD.WIDE R0, R2, R4, R6", lambda s: words(signed(s.r[2]) * signed(s.r[4]) + pair(s, 6)))
case("IMAD.WIDE R0, R2, R4, -R6", lambda s: words(signed(s.r[2]) * signed(s.r[4]) - pair(s, 6)))
case("IMAD.HI R0, R2, R4, RZ", lambda s: {"r0": signed(s.r[2]) * signed(s.r[4]) >> 32 & M32})
case("IMAD.HI.U32 R0, R2, R4, R6", lambda s: {"r0": (s.r[2] * s.r[4] + pair(s, 6)) >> 32 & M32})


def wide(s: Sample, x: int = 0) -> dict:
    total = s.r[2] * s.r[4] + pair(s, 6) + x
    return {**words(total), "p0": total >> 64}


case("IMAD.WIDE.U32 R0, P0, R2, R4, R6", wide)
case("IMAD.WIDE.U32 R0, R2, R4, R6", lambda s: {**wide(s), "p0": s.p[0]})
case("IMAD.WIDE.U32.X R0, P0, R2, R4, R6, P1", lambda s: wide(s, s.p[1]))
for how, of in (("", signed), (".U32", int)):
    case(f"IMNMX{how} R0, R2, R4, P1", lambda s, of=of: {"r0": (min if s.p[1] else max)(s.r[2], s.r[4], key=of)})
ORDERS = {"LT": -1, "EQ": 0, "GT": 1}
COMPARES = {"LT": "<", "EQ": "=", "LE": "<=", "GT": ">", "NE": "<>", "GE": ">="}
LOGICS = {"AND": int.__and__, "OR": int.__or__, "XOR": int.__xor__}


def holds(sign: str, a: object, b: object) -> int:
    return int(("<" in sign and a < b) or ("=" in sign and a == b) or (">" in sign and a > b))


def set_both(yes: int, x: int, logic: str) -> dict:
    return {"p0": LOGICS[logic](yes, x), "p6": LOGICS[logic](1 - yes, x)}


for (compare, sign), (how, of), logic in itertools.product(COMPARES.items(), (("", signed), (".U32", int)), LOGICS):
    case(
        f"ISETP.{compare}{how}.{logic} P0, P6, R2, R4, P1",
        lambda s, sign=sign, of=of, logic=logic: set_both(holds(sign, of(s.r[2]), of(s.r[4])), s.p[1], logic),
    )
for (compare, sign), (how, width) in itertools.product(COMPARES.items(), (("", 64), (".U32", 65))):

    def extended(s: Sample, sign: str = sign, width: int = width) -> dict:
        """Of the upper halves, where the lower ones' comparison is P2."""
        a, b = (signed(s.r[i], 32 if width == 64 else 33) for i in (2, 4))
        return set_both(s.p[2] if a == b else holds(sign, a, b), s.p[1], "AND")

    case(f"ISETP.{compare}{how}.AND.EX P0, P6, R2, R4, P1, P2", extended)


def logical(a: int, b: int, c: int, lut: int, width: int = 32) -> int:
    picks = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(width))
    return sum((lut >> pick & 1) << i for i, pick in enumerate(picks))


for lut in (0xC0, 0xFC, 0x3C, 0xE2, 0x96, 0x01, 0x80):
    case(
        f"LOP3.LUT P0, R0, R2, R4, R6, {lut:#x}, !PT",
        lambda s, lut=lut: (lambda d: {"r0": d, "p0": int(d != 0)})(logical(s.r[2], s.r[4], s.r[6], lut)),
    )
case("LOP3.LUT P0, RZ, R2, 0x1, RZ, 0xc0, P1", lambda s: {"p0": s.r[2] & 1 | s.p[1]})
case(
    "PLOP3.LUT P0, P6, P1, P2, !P3, 0x2a, 0x96",
    lambda s: {
        "p0": logical(s.p[1], s.p[2], 1 - s.p[3], 0x2A, 1),
        "p6": logical(s.p[1], s.p[2], 1 - s.p[3], 0x96, 1),
    },
)
for way, kind, high, wraps in itertools.product("LR", ("U32", "S32", "U64", "S64"), ("", ".HI"), ("", ".W")):

    def shifted(s: Sample, way: str = way, kind: str = kind, high: str = high, wraps: str = wraps) -> dict:
        width, value = int(kind[1:]), pair(s, 2)
        by = s.r[4] % width if wraps else min(s.r[4], width)
        # The low word comes from R2, the high one from R3.
        value = value << by if way == "L" else (signed(value, 64) if kind[0] == "S" else value) >> by
        return {"r0": value >> (32 if high else 0) & M32}

    case(f"SHF.{way}{wraps}.{kind}{high} R0, R2, R4, R3", shifted)
case("LEA R0, R2, R4, 0x3", lambda s: {"r0": ((s.r[2] << 3) + s.r[4]) & M32})
case("LEA R0, -R2, R4, 0x3", lambda s: {"r0": ((-s.r[2] << 3) + s.r[4]) & M32})


def carried(total: int) -> dict:
    return {"r0": total & M32, "p0": total >> 32}


case("LEA R0, P0, R2, R4, 0x3", lambda s: carried((s.r[2] << 3 & M32) + s.r[4]))
case("LEA.HI R0, P0, R2, R4, R3, 0x3", lambda s: carried((pair(s, 2) << 3 >> 32 & M32) + s.r[4]))
case(
    "LEA.HI.X R0, P0, R2, ~R4, R3, 0x3, P1", lambda s: carried((pair(s, 2) << 3 >> 32 & M32) + (~s.r[4] & M32) + s.p[1])
)
case("LEA.HI.SX32 R0, P0, R2, R4, 0x3", lambda s: carried((signed(s.r[2]) << 3 >> 32 & M32) + s.r[4]))
case("LEA.HI.X.SX32 R0, R2, R4, 0x3, P1", lambda s: {"r0": ((signed(s.r[2]) << 3 >> 32) + s.r[4] + s.p[1]) & M32})


def permuted(s: Sample) -> dict:
    """Each byte by four bits of R4: which of eight, and whether only its sign."""
    source = (s.r[2] | s.r[6] << 32).to_bytes(8, "little")
    found = []
    for i in range(4):
        pick = s.r[4] >> 4 * i & 15
        found.append((255 if source[pick & 7] > 127 else 0) if pick & 8 else source[pick & 7])
    return {"r0": int.from_bytes(bytes(found), "little")}


case("PRMT R0, R2, R4, R6", permuted)
case("POPC R0, R2", lambda s: {"r0": bin(s.r[2]).count("1")})
case("BREV R0, R2", lambda s: {"r0": int(f"{s.r[2]:032b}"[::-1], 2)})
case(
    "BMSK R0, R2, R4",
    lambda s: {
        "r0": ((1 << s.r[4]) - 1 << s.r[2]) & M32
        if s.r[2] < 32 and s.r[4] < 99
        else (M32 << s.r[2]) & M32
        if s.r[2] < 32
        else 0
    },
)
case("FLO.U32 R0, R2", lambda s: {"r0": (s.r[2].bit_length() - 1) & M32})
case("FLO.U32.SH R0, R2", lambda s: {"r0": 32 - s.r[2].bit_length() if s.r[2] else M32})
case("FLO R0, R2", lambda s: {"r0": ((s.r[2] ^ (M32 if s.r[2] >> 31 else 0)).bit_length() - 1) & M32})
case("SGXT.U32 R0, R2, 0x8", lambda s: {"r0": s.r[2] & 0xFF})
case("SGXT R0, R2, 0x8", lambda s: {"r0": signed(s.r[2], 8) & M32})
case(
    "IDP.2A.LO.U16.U8 R0, R2, R4, R6",
    lambda s: {"r0": (s.r[6] + (s.r[2] & 0xFFFF) * (s.r[4] & 0xFF) + (s.r[2] >> 16) * (s.r[4] >> 8 & 0xFF)) & M32},
)
case(
    "IDP.2A.LO.S16.S8 R0, R2, R4, R6",
    lambda s: {
        "r0": (s.r[6] + signed(s.r[2], 16) * signed(s.r[4], 8) + signed(s.r[2] >> 16, 16) * signed(s.r[4] >> 8, 8))
        & M32
    },
)
case("VABSDIFF R0, R2, R4, R6", lambda s: {"r0": (abs(signed(s.r[2]) - signed(s.r[4])) + s.r[6]) & M32})
case("VABSDIFF.U32 R0, R2, R4, R6", lambda s: {"r0": (abs(s.r[2] - s.r[4]) + s.r[6]) & M32})
case("P2R R0, PR, R2, 0x7f", lambda s: {"r0": s.r[2] & ~0x7F | sum(p << i for i, p in enumerate(s.p))})
case("R2P PR, R2, 0x41", lambda s: {"p0": s.r[2] & 1, "p6": s.r[2] >> 6 & 1})

# ---- Floating point -------------------------------------------------------------------------------------------------


def source(s: Sample, i: int, width: int = 32, ftz: bool = False) -> Number | None:
    raw = pair(s, i) if width == 64 else s.r[i]
    return number(flushed(raw) if ftz else raw, width)


def negated(x: Number | None) -> Number | None:
    return x and Number(1 - x.negative, x.size)


def absolute(x: Number | None) -> Number | None:
    return x and Number(0, x.size)


def result(value: Number | None, mode: str, ftz: bool = False, sat: bool = False, width: int = 32) -> dict:
    found = bits(value, width, mode)
    if ftz:
        found = flushed(found)
    return {f"f{width}": saturated(found) if sat else found}


for mode, ftz, sat in itertools.product(ROUNDS, ("", ".FTZ"), ("", ".SAT")):
    how = {"mode": mode[1:] or "RN", "ftz": bool(ftz), "sat": bool(sat)}

    def get(s: Sample, i: int, ftz: bool = bool(ftz)) -> Number | None:
        return source(s, i, ftz=ftz)

    def fadd(s: Sample, get: Callable = get, how: dict = how) -> dict:
        return result(add(get(s, 2), get(s, 4), how["mode"]), **how)

    def fmul(s: Sample, get: Callable = get, how: dict = how) -> dict:
        return result(multiply(get(s, 2), get(s, 4)), **how)

    def ffma(s: Sample, get: Callable = get, how: dict = how) -> dict:
        return result(add(multiply(get(s, 2), get(s, 4)), get(s, 6), how["mode"]), **how)

    case(f"FADD{ftz}{mode}{sat} R0, R2, R4", fadd, "f32")
    case(f"FMUL{ftz}{mode}{sat} R0, R2, R4", fmul, "f32")
    case(f"FFMA{ftz}{mode}{sat} R0, R2, R4, R6", ffma, "f32")
case("FADD R0, -R2, |R4|", lambda s: result(add(negated(source(s, 2)), absolute(source(s, 4))), "RN"), "f32")
case("FADD R0, -|R2|, 1.5", lambda s: result(add(negated(absolute(source(s, 2))), number(0x3FC00000, 32)), "RN"), "f32")
for scale, by in (("D2", -1), ("D4", -2), ("D8", -3), ("M2", 1), ("M4", 2), ("M8", 3)):

    def scaled(s: Sample, by: int = by) -> dict:
        return result(multiply(multiply(source(s, 2), source(s, 4)), number(127 + by << 23, 32)), "RN")

    case(f"FMUL.{scale} R0, R2, R4", scaled, "f32")
case("FSEL R0, -R2, |R4|, P1", lambda s: {"r0": s.r[2] ^ 1 << 31 if s.p[1] else s.r[4] & 0x7FFFFFFF}, "f32")
case("FSEL.FTZ R0, R2, R4, P1", lambda s: {"r0": flushed(s.r[2] if s.p[1] else s.r[4])}, "f32")


def order(x: Number | None) -> tuple:
    """Numbers by size; -0 is less than 0."""
    assert x is not None
    return (-math.inf if x.negative else math.inf, 0) if x.size is None else (x.value, -x.negative)


def chosen(s: Sample, ftz: bool) -> dict:
    raw = [flushed(s.r[i]) if ftz else s.r[i] for i in (2, 4)]
    real = [each for each in raw if number(each, 32) is not None]
    pick = min if s.p[1] else max
    return {"f32": pick(real, key=lambda each: order(number(each, 32))) if real else 0x7FC00000}


case("FMNMX R0, R2, R4, P1", lambda s: chosen(s, False), "f32")
case("FMNMX.FTZ R0, R2, R4, P1", lambda s: chosen(s, True), "f32")


def float_holds(compare: str, a: Number | None, b: Number | None) -> int:
    if compare in ("F", "T"):
        return int(compare == "T")
    if a is None or b is None:
        return int(compare == "NAN" or compare.endswith("U"))
    if compare in ("NUM", "NAN"):
        return int(compare == "NUM")
    return holds(COMPARES[compare.rstrip("U")], order(a)[0], order(b)[0])


FLOAT_COMPARES = ["F", "T", "NUM", "NAN", *COMPARES, *(f"{each}U" for each in COMPARES)]
for compare, ftz in itertools.product(FLOAT_COMPARES, ("", ".FTZ")):

    def fsetp(s: Sample, compare: str = compare, ftz: str = ftz) -> dict:
        return set_both(float_holds(compare, source(s, 2, ftz=bool(ftz)), source(s, 4, ftz=bool(ftz))), s.p[1], "AND")

    def fset(s: Sample, compare: str = compare, ftz: str = ftz, one: int = 0x3F800000) -> dict:
        return {"r0": fsetp(s, compare, ftz)["p0"] * one}

    case(f"FSETP.{compare}{ftz}.AND P0, P6, R2, R4, P1", fsetp, "f32")
    case(f"FSET.BF.{compare}{ftz}.AND R0, R2, R4, P1", fset, "f32")
    if not ftz:

        def dsetp(s: Sample, compare: str = compare) -> dict:
            return set_both(float_holds(compare, source(s, 2, 64), source(s, 4, 64)), s.p[1], "OR")

        def hsetp(s: Sample, compare: str = compare) -> dict:
            halves = [(number(s.r[2] >> i & 0xFFFF, 16), number(s.r[4] >> i & 0xFFFF, 16)) for i in (0, 16)]
            low, high = (float_holds(compare, *each) & s.p[1] for each in halves)
            return {"p0": low, "p6": high}

        case(f"DSETP.{compare}.OR P0, P6, R2, R4, P1", dsetp, "f64")
        case(f"HSETP2.{compare}.AND P0, P6, R2, R4, P1", hsetp, "f16")
case("FSET.LT.AND R0, R2, R4, PT", lambda s: {"r0": M32 * float_holds("LT", source(s, 2), source(s, 4))}, "f32")


def extreme(s: Sample, sign: int) -> dict:
    a, b = source(s, 2, 64), source(s, 4, 64)
    first = a is not None and (b is None or (order(a)[0] < order(b)[0] if sign < 0 else order(a)[0] > order(b)[0]))
    return {"p0": int(first), "p6": int(a is None and b is None)}


case("DSETP.MIN.AND P0, P6, R2, R4, PT", lambda s: extreme(s, -1), "f64")
case("DSETP.MAX.AND P0, P6, R2, R4, PT", lambda s: extreme(s, 1), "f64")
for mode in ROUNDS:
    m = mode[1:] or "RN"
    case(
        f"DADD{mode} R0, R2, -R4",
        lambda s, m=m: result(add(source(s, 2, 64), negated(source(s, 4, 64)), m), m, width=64),
        "f64",
    )
    case(
        f"DMUL{mode} R0, R2, R4",
        lambda s, m=m: result(multiply(source(s, 2, 64), source(s, 4, 64)), m, width=64),
        "f64",
    )
    case(
        f"DFMA{mode} R0, R2, R4, R6",
        lambda s, m=m: result(add(multiply(source(s, 2, 64), source(s, 4, 64)), source(s, 6, 64), m), m, width=64),
        "f64",
    )
case("DADD R0, R2, 2.25", lambda s: result(add(source(s, 2, 64), number(0x40020000 << 32, 64)), "RN", width=64), "f64")

# ---- Halves and conversions -----------------------------------------------------------------------------------------


def halves(raw: int) -> list[Number | None]:
    return [number(raw >> i & 0xFFFF, 16) for i in (0, 16)]


def packed(low: Number | None, high: Number | None) -> dict:
    return {"f16x2": bits(low, 16) | bits(high, 16) << 16}


def both(s: Sample, of: Callable) -> dict:
    return packed(*(of(*each) for each in zip(halves(s.r[2]), halves(s.r[4]), halves(s.r[6]))))


case("HADD2 R0, R2, R4", lambda s: both(s, lambda a, b, c: add(a, b)), "f16")
case("HADD2 R0, -R2, |R4|", lambda s: both(s, lambda a, b, c: add(negated(a), absolute(b))), "f16")
case("HADD2 R0, R2, R4.H1_H1", lambda s: packed(*(add(a, halves(s.r[4])[1]) for a in halves(s.r[2]))), "f16")
case("HADD2 R0, R2, 0.5, 3", lambda s: packed(*(add(a, b) for a, b in zip(halves(s.r[2]), halves(0x42003800)))), "f16")
case("HMUL2 R0, R2, R4", lambda s: both(s, lambda a, b, c: multiply(a, b)), "f16")
case("HFMA2 R0, R2, R4, R6", lambda s: both(s, lambda a, b, c: add(multiply(a, b), c)), "f16")
case("HFMA2.MMA R0, -RZ, RZ, 0.5, 3", lambda s: {"r0": 0x42003800}, "f16")
case("HADD2.F32 R0, -RZ, R2.H1_H1", lambda s: {"f32": bits(halves(s.r[2])[1], 32)}, "f16")
case("HADD2.F32 R0, R2.H0_H0, R4.H1_H1", lambda s: result(add(halves(s.r[2])[0], halves(s.r[4])[1]), "RN"), "f16")
for mode in ROUNDS:
    m = mode[1:] or "RN"
    case(
        f"F2FP.PACK_AB{mode} R0, R2, R4",
        lambda s, m=m: {"f16x2": bits(source(s, 2), 16, m) << 16 | bits(source(s, 4), 16, m)},
        "f32",
    )
    case(f"F2F.F16.F32{mode} R0, R2", lambda s, m=m: {"f16x2": bits(source(s, 2), 16, m)}, "f32")
    case(f"F2F.F16.F64{mode} R0, R2", lambda s, m=m: {"f16x2": bits(source(s, 2, 64), 16, m)}, "f64")
    case(f"F2F.F32.F64{mode} R0, R2", lambda s, m=m: result(source(s, 2, 64), m), "f64")
    case(f"F2F.FTZ.F32.F64{mode} R0, R2", lambda s, m=m: result(source(s, 2, 64), m, ftz=True), "f64")
case("F2F.F64.F32 R0, R2", lambda s: {"f64": bits(source(s, 2), 64)}, "f32")
case("F2F.FTZ.F64.F32 R0, |R2|", lambda s: {"f64": bits(number(flushed(s.r[2] & 0x7FFFFFFF), 32), 64)}, "f32")


def integer(value: Number | None, kind: str, nan: int) -> dict:
    width = int(kind[1:])
    least, most = (-(1 << width - 1), (1 << width - 1) - 1) if kind[0] == "S" else (0, (1 << width) - 1)
    if value is None:
        found = nan << (width - 1)
    elif value.size is None:
        found = least if value.negative else most
    else:
        found = min(max(int(value.value), least), most)
    return {"r0": found & M32, "r1": found >> 32 & M32} if width == 64 else {"r0": found & M32}


WHOLES = {"": "RN", ".TRUNC": "TRUNC", ".FLOOR": "FLOOR", ".CEIL": "CEIL"}
for (words_, mode), kind in itertools.product(WHOLES.items(), ("S32", "U32", "S64", "U64")):
    to = "" if kind == "S32" else f".{kind}"

    def f2i(s: Sample, mode: str = mode, kind: str = kind, of: Callable = source, nan: int = 0) -> dict:
        return integer(whole(of(s), mode), kind, nan)

    single, double_, half_ = (lambda s: source(s, 2)), (lambda s: source(s, 2, 64)), (lambda s: halves(s.r[2])[0])
    flat = lambda s: source(s, 2, ftz=True)  # noqa: E731
    case(f"F2I{to}{words_}.NTZ R0, R2", lambda s, f=f2i, of=single: f(s, of=of), "f32")
    case(f"F2I{to}{words_} R0, R2", lambda s, f=f2i, of=single: f(s, of=of, nan=1), "f32")
    case(f"F2I.FTZ{to}{words_}.NTZ R0, R2", lambda s, f=f2i, of=flat: f(s, of=of), "f32")
    case(f"F2I{to}.F64{words_} R0, R2", lambda s, f=f2i, of=double_: f(s, of=of, nan=1), "f64")
    case(f"F2I{to}.F16{words_}.NTZ R0, R2", lambda s, f=f2i, of=half_: f(s, of=of), "f16")
for words_, mode in WHOLES.items():
    case(f"FRND{words_} R0, R2", lambda s, m=mode: {"f32": bits(whole(source(s, 2), m), 32)}, "f32")
    case(f"FRND.FTZ{words_} R0, R2", lambda s, m=mode: {"f32": bits(whole(source(s, 2, ftz=True), m), 32)}, "f32")
    case(f"FRND.F64{words_} R0, R2", lambda s, m=mode: {"f64": bits(whole(source(s, 2, 64), m), 64)}, "f64")


def of_integer(value: int) -> Number:
    return Number(int(value < 0), abs(multiply(number(0x3F800000, 32), number(0x3F800000, 32)).size * value))


KINDS = {"": 32, ".U32": 32, ".S16": 16, ".U16": 16, ".S8": 8, ".U8": 8, ".S64": 64, ".U64": 64}
for (kind, width), mode in itertools.product(KINDS.items(), ROUNDS):

    def i2f(s: Sample, out: int, kind: str = kind, width: int = width, mode: str = mode, at: int = 0) -> dict:
        raw = pair(s, 2) if width == 64 else s.r[2] >> at & (1 << width) - 1
        value = of_integer(raw if "U" in kind else signed(raw, width))
        return {{16: "f16x2"}.get(out, f"f{out}"): bits(value, out, mode[1:] or "RN")}

    case(f"I2F{kind}{mode} R0, R2", lambda s, f=i2f: f(s, 32))
    case(f"I2F.F64{kind}{mode} R0, R2", lambda s, f=i2f: f(s, 64))
    if width < 64:
        case(f"I2F.F16{kind}{mode} R0, R2", lambda s, f=i2f: f(s, 16))
    if width == 8:
        case(f"I2F{kind}{mode} R0, R2.B1", lambda s, f=i2f: f(s, 32, at=8))

# ---- The approximations: not what a GPU gives, but a number that it may give -----------------------------------------


def near(of: Callable[[float], float]) -> Model:
    """Within a unit of the last place of what the function is; subnormal numbers are 0."""

    def model(s: Sample) -> dict:
        x = source(s, 2, ftz=True)
        if x is None:
            return {"f32": 0x7FC00000}
        y = of(math.copysign(math.inf if x.size is None else float(x.size), -1 if x.negative else 1))
        return {"near": y}

    return model


def reciprocal(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else 1 / x


def root(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else math.nan if x < 0 else 1 / math.sqrt(x)


def logarithm(x: float) -> float:
    return -math.inf if x == 0 else math.nan if x < 0 else math.inf if x == math.inf else math.log2(x)


def power(x: float) -> float:
    return math.inf if x > 200 else 0.0 if x < -200 else 2.0**x


case("MUFU.RCP R0, R2", near(reciprocal), "f32")
case("MUFU.RSQ R0, R2", near(root), "f32")
case("MUFU.LG2 R0, R2", near(logarithm), "f32")
case("MUFU.EX2 R0, R2", near(power), "f32")
TURN = 6.283185307179586
case("MUFU.SIN R0, R2", near(lambda x: math.nan if math.isinf(x) else math.sin(x * TURN)), "f32")
case("MUFU.COS R0, R2", near(lambda x: math.nan if math.isinf(x) else math.cos(x * TURN)), "f32")


def upper(of: Callable[[float], float]) -> Model:
    def model(s: Sample) -> dict:
        x = number(s.r[2] << 32, 64)
        if x is None:
            return {"nan_of_upper": True}
        y = of(math.copysign(math.inf if x.size is None else float(x.size), -1 if x.negative else 1))
        return {"upper": y}

    return model


case("MUFU.RCP64H R0, R2", upper(reciprocal), "f32")
case("MUFU.RSQ64H R0, R2", upper(root), "f32")
# It must say so wherever a quotient or one of the steps towards it leaves the range of normal numbers.
case("FCHK P0, R2, R4", lambda s: {"hard": s.r[2:5:2]}, "f32")

# ---- Memory ---------------------------------------------------------------------------------------------------------


def read(s: Sample, at: int, size: int, sign: bool = False) -> int:
    return int.from_bytes(s.memory[at : at + size], "little", signed=sign)


def written(s: Sample, at: int, size: int, value: int) -> dict:
    data = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    return {"memory": s.memory[:at] + data + s.memory[at + size :]}


PIECES = {"": (4, False), ".U8": (1, False), ".S8": (1, True), ".U16": (2, False), ".S16": (2, True), ".64": (8, False)}
SPACES = {"": "[R8.64+0x8]", "G": "[R8.64+0x8]", "S": "[0x8]", "L": "[0x8]"}
for (suffix, at), (piece, (size, sign)) in itertools.product(SPACES.items(), PIECES.items()):
    e = ".E" if suffix in ("", "G") else ""

    def loaded(s: Sample, size: int = size, sign: bool = sign) -> dict:
        value = read(s, 8, size, sign)
        return words(value) if size == 8 else {"r0": value & M32}

    def stored(s: Sample, size: int = size) -> dict:
        return written(s, 8, size, pair(s, 2))

    case(f"LD{suffix}{e}{piece} R0, {at}", loaded)
    case(f"ST{suffix}{e}{piece} {at}, R2", stored)
    if suffix == "L":
        case(f"LDC{piece} R0, c[0x0][0x8]", loaded)
for suffix, at in SPACES.items():
    e = ".E" if suffix in ("", "G") else ""
    case(f"ST{suffix}{e}.128 {at}, R4", lambda s: {"quad_stored": 8})
    case(f"LD{suffix}{e}.128 R0, {at}", lambda s: {"quad_loaded": 8})


def atomic(s: Sample, new: Callable[[int, int], int], size: int = 4) -> dict:
    old, given = read(s, 8, size), pair(s, 2) if size == 8 else s.r[2]
    return {**written(s, 8, size, new(old, given)), **(words(old) if size == 8 else {"r0": old})}


def float_sum(width: int, ftz: bool = False) -> Callable[[int, int], int]:
    def new(old: int, given: int) -> int:
        a, b = (number(flushed(x) if ftz else x, width) for x in (old, given))
        found = bits(add(a, b), width)
        return flushed(found) if ftz else found

    return new


def half_sum(old: int, given: int) -> int:
    return packed(*(add(a, b) for a, b in zip(halves(old), halves(given))))["f16x2"]


ATOMICS: dict[str, tuple[Callable[[int, int], int], int]] = {
    "ADD": (lambda a, b: a + b, 4),
    "ADD.64": (lambda a, b: a + b, 8),
    "EXCH": (lambda a, b: b, 4),
    "EXCH.64": (lambda a, b: b, 8),
    "MIN": (min, 4),
    "MAX.S32": (lambda a, b: max(a, b, key=signed), 4),
    "MIN.64": (min, 8),
    "MAX.S64": (lambda a, b: max(a, b, key=lambda x: signed(x, 64)), 8),
    "AND": (int.__and__, 4),
    "OR": (int.__or__, 4),
    "XOR": (int.__xor__, 4),
    "INC": (lambda a, b: 0 if a >= b else a + 1, 4),
    "ADD.F32.FTZ.RN": (float_sum(32, ftz=True), 4),
    "ADD.F64.RN": (float_sum(64), 8),
    "ADD.F16x2.RN": (half_sum, 4),
}
for what, (new, size) in ATOMICS.items():

    def changed(s: Sample, new: Callable = new, size: int = size) -> dict:
        return {**atomic(s, new, size), "float_memory": True}

    for opcode in ("ATOM", "ATOMG"):
        case(f"{opcode}.E.{what}.STRONG.GPU P0, R0, [R8.64+0x8], R2", lambda s, f=changed: {**f(s), "p0": 1}, "f32")
    case(f"ATOMS.{what} R0, [0x8], R2", changed, "f32")
    case(
        f"RED.E.{what}.STRONG.GPU [R8.64+0x8], R2",
        lambda s, f=changed: {k: v for k, v in f(s).items() if "memory" in k},
        "f32",
    )
for what, size in (("CAS", 4), ("CAS.64", 8)):

    def swapped(s: Sample, size: int = size) -> dict:
        same = read(s, 8, size) == (pair(s, 2) if size == 8 else s.r[2])
        return atomic(s, lambda old, given: (pair(s, 4) if size == 8 else s.r[4]) if same else old, size)

    for opcode in ("ATOM", "ATOMG"):
        text = f"{opcode}.E.{what}.STRONG.GPU P0, R0, [R8.64+0x8], R2, R4"
        case(text, lambda s, f=swapped: {**f(s), "p0": 1}, "same in memory")
    case(f"ATOMS.{what} R0, [0x8], R2, R4", swapped, "same in memory")
case(
    "ATOMS.CAST.SPIN R0, [0x8], R2, R4",
    lambda s: {**written(s, 8, 4, s.r[4]), "r0": 1} if read(s, 8, 4) == s.r[2] else {"r0": 0},
    "same in memory",
)
case("ATOMS.POPC.INC.32 RZ, [0x8]", lambda s: written(s, 8, 4, (read(s, 8, 4) + 1) & M32))
case("QSPC.E.S P0, RZ, [R8.64]", lambda s: {"p0": 1})
case("S2R R0, SR_TID.Y", lambda s: {"r0": 5})
case("S2R R0, SR_CTAID.Z", lambda s: {"r0": 17})
case("S2R R0, SR_LTMASK", lambda s: {"r0": (1 << 19) - 1})
case("S2R R0, SR_GEMASK", lambda s: {"r0": M32 - (1 << 19) + 1})
case("S2UR UR4, SR_CTAID.X", lambda s: {})
case("CS2R R0, SRZ", lambda s: {"r0": 0, "r1": 0})
case("CS2R.32 R0, SRZ", lambda s: {"r0": 0})
case("R2UR UR4, R2", lambda s: {})
for text in ("NOP", "YIELD", "ERRBAR", "MEMBAR.SC.CTA", "CCTL.IVALL", "DEPBAR.LE SB0, 0x0, {2,1}"):
    case(text, lambda s: {})


# ---- The comparison -------------------------------------------------------------------------------------------------


def literal(text: str) -> int:
    return next((found for words_, found in LITERALS.items() if text.endswith(words_)), 0)


def is_nan(raw: int, width: int) -> bool:
    return number(raw, width) is None


def float_of(raw: int, width: int) -> float:
    found = number(raw, width)
    if found is None:
        return math.nan
    return math.copysign(math.inf if found.size is None else float(found.size), -1 if found.negative else 1)


def difference(before: Sample, after: Sample, wanted: dict) -> str | None:
    """What an instruction left that it should not have."""
    r, p, memory = [BEFORE, BEFORE ^ 1], list(before.p), before.memory
    loose: list[tuple[int, int, int]] = []  # what was found, what is wanted, its width: any NaN is as good as another
    for what, value in wanted.items():
        if what in ("r0", "r1"):
            r[int(what[1])] = value
        elif what in ("p0", "p6"):
            p[int(what[1])] = value
        elif what == "memory":
            memory = value
        elif what in ("f32", "f64"):
            found = after.r[0] if what == "f32" else after.r[0] | after.r[1] << 32
            loose.append((found, value, int(what[1:])))
            r[:2] = after.r[: 1 if what == "f32" else 2] + r[1 if what == "f32" else 2 : 2]
        elif what == "f16x2":
            loose += [(after.r[0] >> i & 0xFFFF, value >> i & 0xFFFF, 16) for i in (0, 16)]
            r[0] = after.r[0]
        elif what == "near":
            found, rounded = float_of(after.r[0], 32), float_of(flushed(bits(exact_of(value), 32)), 32)
            if not (
                found == rounded
                or abs(found - rounded) <= abs(value) * 2**-22
                or (math.isnan(found) and math.isnan(value))
            ):
                return f"{found} for {value}"
            r[0] = after.r[0]
        elif what == "upper":
            found = float_of(after.r[0] << 32, 64)
            if not (found == value or abs(found - value) <= abs(value) * 2**-18 or math.isnan(value)):
                return f"{found} for {value}"
            r[0] = after.r[0]
        elif what == "nan_of_upper":
            r[0] = after.r[0]
        elif what == "hard":
            a, b = (float_of(x, 32) for x in value)
            quotient = math.nan if b == 0 or math.isnan(a) or math.isnan(b) or math.isinf(a) else a / b
            if not after.p[0] and not 2**-125 < abs(quotient) < 2**126:
                return f"{a} / {b} = {quotient} passed for easy"
            p[0] = after.p[0]
        elif what == "quad_loaded":
            got = b"".join(each.to_bytes(4, "little") for each in after.r[:4])
            if got != before.memory[8:24]:
                return f"{got!r}"
            return None
        elif what == "quad_stored":
            data = b"".join(each.to_bytes(4, "little") for each in before.r[4:8])
            memory = memory[:8] + data + memory[24:]
    if wanted.get("float_memory") and after.memory != memory:
        width = 8 if after.memory[12:16] != memory[12:16] else 4
        new, want = (int.from_bytes(data[8 : 8 + width], "little") for data in (after.memory, memory))
        parts = [(new >> i & 0xFFFF, want >> i & 0xFFFF, 16) for i in (0, 16)]
        if not is_nan(new, 8 * width) or not is_nan(want, 8 * width):
            loose += parts if width == 4 else [(new, want, 64)]
        memory = after.memory
    for found, want, width in loose:
        if found != want and not (is_nan(found, width) and is_nan(want, width)):
            return f"{found:#x}, not {want:#x}"
    if after.r[:2] != r or after.r[2:8] != before.r[2:8] or after.p != p or after.memory != memory:
        return f"r {[hex(x) for x in after.r]} p {after.p}, not r {[hex(x) for x in r]} p {p}"
    return None


def exact_of(value: float) -> Number | None:
    if math.isnan(value):
        return None
    negative = int(math.copysign(1, value) < 0)
    return Number(negative, None if math.isinf(value) else Fraction(abs(value)))


def faults(texts: list[str]) -> Iterator[str]:
    """The first difference of each instruction that has one."""
    kinds = [CASES[text][0] for text in texts]
    for text, kind, after in zip(texts, kinds, run(texts, kinds, literal)):
        for before, left in zip(samples(kind), after):
            found = difference(before, left, CASES[text][1](before))
            if found:
                yield f"{text}: {found}; R2.. {[hex(x) for x in before.r[2:8]]} P {before.p}"
                break


def test_every_instruction_is_what_it_is_defined_to_be():
    assert list(faults(list(CASES))) == []


def test_every_row_of_the_table_has_a_case():
    tested = {id(operation(parse(0, text)).row) for text in CASES}
    assert {
        f"{r.opcode} {r.slots}" for rows in TABLE.values() for r in rows if r.c is not None and id(r) not in tested
    } == set()


@pytest.mark.parametrize(
    ("opcode", "wrong", "text"),
    [
        ("FADD", ("add_$round", "add_RN"), "FADD.RP R0, R2, R4"),
        ("FFMA", ("fma_$round", "fma_RZ"), "FFMA R0, R2, R4, R6"),
        ("FFMA", ("flush(c, $FTZ)", "c"), "FFMA.FTZ R0, R2, R4, R6"),
        ("FMUL", (", $SAT)", ", 0)"), "FMUL.SAT R0, R2, R4"),
        (
            "HFMA2",
            ("half_RN((double)a.low * b.low + c.low)", "half_RN(to_float(half_RN(a.low * b.low)) + c.low)"),
            "HFMA2 R0, R2, R4, R6",
        ),
        ("F2FP", ("half_$round(b)", "half_RZ(b)"), "F2FP.PACK_AB R0, R2, R4"),
        ("F2I", (", $NTZ", ", 1"), "F2I.F64.TRUNC R0, R2"),
        ("I2F", ("half_$round((double)", "half_RN((double)"), "I2F.F16.RZ R0, R2"),
        ("IADD3", ("c2 = sum >> 32 >= 2;", ""), "IADD3 R0, P0, P6, R2, R4, R6"),
        ("ATOMG", ("ok = 1;", "ok = 0;"), "ATOMG.E.ADD.STRONG.GPU P0, R0, [R8.64+0x8], R2"),
        ("FMNMX", ("least_of", "fminf"), "FMNMX R0, R2, R4, P1"),
    ],
)
def test_a_fault_in_the_table_is_found(monkeypatch, opcode, wrong, text):
    rows = [each._replace(c=each.c and each.c.replace(*wrong)) for each in TABLE[opcode]]
    assert rows != TABLE[opcode]
    monkeypatch.setitem(table.TABLE, opcode, rows)
    assert len(list(faults([text]))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "FADD.FTZ.XX R0, R2, R4",  # a modifier
        "FADD R0, P1, R2, R4",  # a result
        "FADD R0, R2, R4, R6",  # an operand
        "FADD R0, ~R2, R4",  # what stands before one
        "FADD R0, R2.H0_H0, R4",  # a part of one
        "FADD R0, R2, 0x3",
        "IADD3 R0, P0, P1, P2, R2, R4, R6",
        "LDG.E R0, [R2.64+UR4]",
        "LDG.E R0, P1, [R2.64]",
        "ATOMS.POPC.INC.32 R0, [R2.X4]",
        "S2R R0, SR_CLOCKLO",
        "MATCH.ANY R0, R2",
        "BAR.SYNC 0x1",
    ],
)
def test_what_no_row_names_is_refused_with_the_instruction(text):
    with pytest.raises(UnknownInstructionError):
        Threads().statement(operation(parse(0, text)))


def test_half_of_each_edge_is_itself_again():
    assert [bits(number(edge, 16), 16) for edge in EDGES_16 if not is_nan(edge, 16)] == [
        e for e in EDGES_16 if not is_nan(e, 16)
    ]
    assert set(FORMATS) == {16, 32, 64}
