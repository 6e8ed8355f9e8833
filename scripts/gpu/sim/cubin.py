"""Cubins: ELF files with the machine code of kernels, and the index that says which file has which of MXNet's.

python -m gpu.sim.cubin      # makes the index of MXMP_SIMGPU_HOME, of all in its folder "cubin"
"""

from __future__ import annotations

import os
import re
import sqlite3
import struct
from pathlib import Path
from typing import NamedTuple

from .decode import BYTES, Global, UnknownInstructionError

NO_BITS = 8  # the type of sections of zeros
ADDRESS_LOW, ADDRESS_HIGH = 56, 57  # relocations of a MOV's 32 bits
PARAMETERS_BASE, PARAMETER = 0x0A, 0x17  # attributes of .nv.info
FRAME_SIZES = (0x11, 0x12, 0x23)
OF_DRIVER = ("vprintf", "__assertfail", "free", "malloc")  # only CALL.ABS reaches them, and that ends the process
FUNCTION = 2  # the type of a symbol


class Kernel(NamedTuple):
    name: str
    code: bytes
    banks: dict[int, bytes]  # of constants, without the launch's own, bank 0
    globals: dict[str, bytes]  # variables that it reads, with what is in them
    relocations: dict[int, Global]  # by the instruction's address
    parameters: list[tuple[int, int]]  # offset from the base and size, in bytes
    base: int  # of the parameters in bank 0
    shared: int  # bytes
    frame: int  # bytes of local memory


class Section(NamedTuple):
    name: str
    kind: int
    offset: int
    size: int


class Cubin:
    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        head = self._file.read(64)
        if head[:4] != b"\x7fELF":
            raise ValueError(f"{path} is no cubin")
        (at,) = struct.unpack_from("<Q", head, 0x28)
        each, count, names = struct.unpack_from("<HHH", head, 0x3A)
        self._file.seek(at)
        table = self._file.read(each * count)
        raw = [struct.unpack_from("<IIQQQQ", table, i * each) for i in range(count)]
        text = self._read(raw[names][4], raw[names][5])
        self.sections = [Section(_word(text, n), kind, offset, size) for n, kind, _, _, offset, size in raw]
        self._places = {section.name: i for i, section in enumerate(self.sections)}

    def _read(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)

    def data(self, name: str) -> bytes:
        """Of the section of that name; nothing where there is none."""
        if name not in self._places:
            return b""
        section = self.sections[self._places[name]]
        return bytes(section.size) if section.kind == NO_BITS else self._read(section.offset, section.size)

    @property
    def kernels(self) -> dict[str, int]:
        """Their names and the bytes of their code."""
        return {s.name[6:]: s.size for s in self.sections if s.name.startswith(".text.")}

    def _symbols(self) -> list[tuple[str, int, int, int, int]]:
        """Name, type, section, offset and size of each."""
        table, text = self.data(".symtab"), self.data(".strtab")
        found = [struct.unpack_from("<IBBHQQ", table, i) for i in range(0, len(table), 24)]
        return [(_word(text, n), info & 15, section, at, size) for n, info, _, section, at, size in found]

    def kernel(self, name: str) -> Kernel:
        code = self.data(f".text.{name}")
        if not code:
            raise UnknownInstructionError("no such kernel")
        symbols = self._symbols()
        values, relocations = {}, {}
        for at, kind, symbol in self._relocations(f".text.{name}"):
            target, of_type, section, offset, size = symbols[symbol]
            home = self.sections[section].name if section < len(self.sections) else ""
            if home == ".nv.global.init" and kind in (ADDRESS_LOW, ADDRESS_HIGH):
                values[target] = self.data(home)[offset : offset + size]
                relocations[at - at % BYTES] = Global(target, int(kind == ADDRESS_HIGH))
            elif target not in OF_DRIVER and of_type != FUNCTION:
                raise UnknownInstructionError(f"a relocation of {target}")
        banks = {}
        for section in self.sections:
            found = re.fullmatch(r"\.nv\.constant(\d+)(\..*)?", section.name)
            if found and found[1] != "0" and found[2] in (None, f".{name}"):
                if found[2] and self._relocations(section.name):
                    raise UnknownInstructionError(f"relocations of {section.name}")
                banks[int(found[1])] = self.data(section.name)
        parameters, base = self._parameters(name)
        shared = self._places.get(f".nv.shared.{name}")
        return Kernel(
            *(name, code, banks, values, relocations, parameters, base),
            shared=self.sections[shared].size if shared is not None else 0,
            frame=self._frame(name, symbols),
        )

    def _relocations(self, section: str) -> list[tuple[int, int, int]]:
        """Offset, type and symbol of each; one that also adds something is refused."""
        found = [(at, info) for at, info in struct.iter_unpack("<QQ", self.data(f".rel{section}"))]
        for at, info, addend in struct.iter_unpack("<QQq", self.data(f".rela{section}")):
            if addend and section.startswith(".text."):
                raise UnknownInstructionError(f"a relocation of {section} with an addend")
            found.append((at, info))
        return [(at, info & 0xFFFFFFFF, info >> 32) for at, info in found]

    def _parameters(self, name: str) -> tuple[list[tuple[int, int]], int]:
        found, base = {}, 0x160
        for attribute, body in _attributes(self.data(f".nv.info.{name}")):
            if attribute == PARAMETER:
                _, number, offset, packed = struct.unpack_from("<IHHI", body)
                found[number] = (offset, packed >> 18)
            if attribute == PARAMETERS_BASE:
                _, base, _ = struct.unpack_from("<IHH", body)
        return [found[number] for number in sorted(found)], base

    def _frame(self, name: str, symbols: list[tuple[str, int, int, int, int]]) -> int:
        sizes = [0]
        for attribute, body in _attributes(self.data(".nv.info")):
            if attribute in FRAME_SIZES:
                symbol, size = struct.unpack_from("<II", body)
                sizes.append(size if symbols[symbol][0] == name else 0)
        return max(sizes)


def _word(text: bytes, at: int) -> str:
    return text[at : text.index(b"\0", at)].decode()


def _attributes(raw: bytes) -> list[tuple[int, bytes]]:
    """Those of .nv.info that have a body."""
    found, at = [], 0
    while at < len(raw):
        kind, attribute, size = struct.unpack_from("<BBH", raw, at)
        at += 4
        if kind == 4:
            found.append((attribute, raw[at : at + size]))
            at += size
    return found


def find(home: Path, name: str) -> Path:
    """The cubin with one of MXNet's kernels."""
    with sqlite3.connect(home / "index.sqlite") as index:
        found = index.execute("select cubin from kernels where name = ?", (name,)).fetchone()
    if found is None:
        raise UnknownInstructionError("no cubin has this kernel")
    return home / "cubin" / found[0]


def make_index(home: Path) -> int:
    """Write the index, whole or not at all; how many kernels it has."""
    scratch = home / f"index.{os.getpid()}"
    with sqlite3.connect(scratch) as index:
        index.execute("create table kernels(name text primary key, cubin text, bytes int)")
        for path in sorted((home / "cubin").glob("*.cubin")):
            rows = [(name, path.name, size) for name, size in Cubin(path).kernels.items()]
            index.executemany("insert or ignore into kernels values(?, ?, ?)", rows)
        (count,) = index.execute("select count(*) from kernels").fetchone()
    index.close()
    scratch.replace(home / "index.sqlite")
    return count


if __name__ == "__main__":
    print(f"simulated GPU: {make_index(Path(os.environ['MXMP_SIMGPU_HOME']))} kernels")
