"""Runs single instructions of the table, and small programs, on chosen operands: no GPU's code, no MXNet."""

from __future__ import annotations

import ctypes
import itertools
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Iterable

from gpu.sim.cubin import Kernel
from gpu.sim.decode import BYTES, parse
from gpu.sim.kernel import compiled, in_c
from gpu.sim.table import Operation, operation
from gpu.sim.threads import Threads

REGISTERS = 10  # R0 and R1 are for results, R2 to R7 for operands, and R8 and R9 hold the address of the memory
MEMORY = 64  # bytes
BEFORE = 0xDEADBEEF  # what is in a register to which nothing is written
Sample = SimpleNamespace  # r: registers; p: predicates; memory: bytes

EDGES_32 = [0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3F000000, 0x3FC00000]
EDGES_32 += [0x40200000, 0x4B7FFFFF, 0x4B800001, 0x4F000000, 0x4F7FFFFF, 0x4F800000, 0x5F000000, 0x7F7FFFFF]
EDGES_32 += [0x7F800000, 0x7FC00000, 0x477FE000, 0x477FF000, 0x33000000, 0x33000001, 0x38800000, 0x7FFFFFFF]
EDGES_32 += [edge | 0x80000000 for edge in EDGES_32] + [31, 32, 33, 63, 64, 255, 0x01234567]
EDGES_16 = [0, 1, 0x3FF, 0x400, 0x3BFF, 0x3C00, 0x3C01, 0x3800, 0x6400, 0x7BFF, 0x7C00, 0x7E00]
EDGES_16 += [edge | 0x8000 for edge in EDGES_16]
EDGES_64 = [0, 1, 0xFFFFFFFFFFFFF, 1 << 52, 0x3FF0000000000000, 0x3FEFFFFFFFFFFFFF, 0x3FF0000000000001]
EDGES_64 += [0x3FE0000000000000, 0x4330000000000001, 0x41DFFFFFFFC00000, 0x41F0000000000000, 0x43E0000000000000]
EDGES_64 += [0x43F0000000000000, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000, 0x47EFFFFFF0000000]
EDGES_64 += [0x3FF0000010000000, 0x3FF0000030000000, 0x3F10000000000001, 0x40EFFC0000000000, 0x40EFFE0000000000]
EDGES_64 += [edge | 1 << 63 for edge in EDGES_64]


def samples(kind: str, count: int = 220) -> list[Sample]:
    """Operands: edges with edges, edges with random ones, random ones, and near ones, which cancel."""
    draw = random.Random(7)
    width = {"f64": 64}.get(kind, 32)
    edges = {"f64": EDGES_64, "f16": [h | draw.choice(EDGES_16) << 16 for h in EDGES_16]}.get(kind, EDGES_32)
    pairs = draw.sample(list(itertools.product(edges, edges)), min(count // 2, len(edges) ** 2))
    found = []
    for i in range(count):
        words = list(pairs[i]) if i < len(pairs) else [draw.getrandbits(width) for _ in "ab"]
        words.append(draw.choice(edges) if i % 2 else draw.getrandbits(width))
        if i >= len(pairs) and i % 3 == 0:  # of about the same size
            words[1] = words[0] ^ 1 << (width - 1) ^ draw.getrandbits(4)
        raw = [word >> 32 * k & 0xFFFFFFFF for word in words for k in (0, 1)]
        if width == 32:  # the odd registers hold the upper halves of 64-bit operands
            raw[1::2] = [draw.choice([*edges, draw.getrandbits(32)]) for _ in raw[1::2]]
        memory = bytes(draw.getrandbits(8) for _ in range(MEMORY))
        if kind == "same in memory" and i % 2:  # what CAS looks for
            memory = memory[:8] + b"".join(word.to_bytes(4, "little") for word in raw[:2]) + memory[16:]
        predicates = [draw.getrandbits(1) for _ in range(7)]
        found.append(Sample(r=[BEFORE, BEFORE ^ 1, *raw, 0, 0], p=predicates, memory=memory))
    return found


def run(texts: Iterable[str], kinds: Iterable[str], literal: Callable[[str], int]) -> list[list[Sample]]:
    """What each instruction leaves of its samples, all compiled into one library."""
    operations = [operation(parse(0, text, literal(text))) for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "table.c", Path(folder) / "table.so"
        source.write_text(_in_c(operations), encoding="utf-8")
        compiled(source, library, "-O1")
        loaded = ctypes.CDLL(str(library))
    return [_results(getattr(loaded, f"run{i}"), samples(kind)) for i, kind in enumerate(kinds)]


def _in_c(operations: list[Operation]) -> str:
    lines = ['#define KERNEL "a test"', '#include "machine.h"']
    lines += ["#define bank0 ((const u8 *)memory)", "#define SHARED (u64)memory", "#define LOCAL (u64)memory"]
    lines += ["enum { TID_X = 3, TID_Y = 5, TID_Z = 7, CTAID_X = 11, CTAID_Y = 13, CTAID_Z = 17, LANE = 19 };"]
    for i, each in enumerate(operations):
        names = Threads()
        statement = names.guarded(each, names.statement(each))
        lines.append(f"void run{i}(u32 *r, u8 *p, u8 *memory) {{")
        lines += [f"u32 {', '.join(f'r{k} = r[{k}]' for k in range(REGISTERS))}, ur4 = r4, ur5 = r5;"]
        lines += [f"u8 {', '.join(f'p{k} = p[{k}]' for k in range(7))};", statement or ";"]
        lines += [f"r[{k}] = r{k};" for k in range(REGISTERS)] + [f"p[{k}] = p{k};" for k in range(7)] + ["}"]
    return "\n".join(lines)


def _results(function: Callable[..., None], found: list[Sample]) -> list[Sample]:
    after = []
    for sample in found:
        memory = ctypes.create_string_buffer(sample.memory, MEMORY)
        address = ctypes.addressof(memory)
        words = [*sample.r[:8], address & 0xFFFFFFFF, address >> 32]
        r, p = (ctypes.c_uint32 * REGISTERS)(*words), (ctypes.c_uint8 * 7)(*sample.p)
        function(r, p, memory)
        after.append(Sample(r=[*list(r)[:8], 0, 0], p=list(p), memory=memory.raw))
    return after


class Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("local_bytes", ctypes.c_uint32),
        ("bank0", ctypes.c_char_p),
    )


def program(lines: str, threads: int, words: list[int], shared: int = 256, blocks: int = 1) -> list[int]:
    """Runs a program on an array of words, whose address is at c[0x0][0x160]; what it leaves there."""
    return launcher(lines, shared)(threads, words, blocks)


def launcher(lines: str, shared: int = 256) -> Callable[..., list[int]]:
    """A function that runs a program, as ``program`` does, on ``threads``, ``words`` and perhaps ``blocks``."""
    texts = [line.strip() for line in lines.strip().splitlines()]
    kernel = Kernel("a program", b"", {}, {}, {}, [(0, 8)], 0x160, shared, 0)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "program.c", Path(folder) / "program.so"
        source.write_text(in_c(kernel, [parse(BYTES * i, text) for i, text in enumerate(texts)]), encoding="utf-8")
        compiled(source, library, "-O1")
        loaded = ctypes.CDLL(str(library))

    def launched(threads: int, words: list[int], blocks: int = 1) -> list[int]:
        data = (ctypes.c_uint32 * len(words))(*words)
        bank0 = bytearray(512)
        bank0[0x160:0x168] = ctypes.addressof(data).to_bytes(8, "little")
        launch = Launch(
            (ctypes.c_uint32 * 3)(blocks, 1, 1), (ctypes.c_uint32 * 3)(threads, 1, 1), shared, 512, bytes(bank0)
        )
        loaded.simgpu_launch(ctypes.byref(launch))
        return list(data)

    return launched
