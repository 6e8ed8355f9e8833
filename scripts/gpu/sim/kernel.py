"""One kernel of a cubin -> C -> a library that the stub of CUDA's runtime loads.

    python -m gpu.sim.kernel                   # makes and prints the name of this translator's folder of links
    python -m gpu.sim.kernel MANGLED           # of MXNet's; prints the library's path
    python -m gpu.sim.kernel MANGLED CUBIN     # of a file

Libraries are kept, under the hash of what they are made of, in ``cache`` of MXMP_SIMGPU_HOME.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from .cubin import Cubin, Kernel, find
from .decode import Global, Instruction, Integer, Operand, UnknownInstructionError, disassembled
from .flow import works_together
from .table import operation
from .threads import Threads
from .warps import Warps

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=gnu11", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fno-strict-aliasing", "-fwrapv", "-w", "-shared", "-fPIC"]
STACK = 512  # bytes of local memory beyond what the kernel says


def in_c(kernel: Kernel, instructions: list[Instruction]) -> str:
    """A kernel's C."""
    operations = [operation(_with_globals(each, kernel)) for each in instructions]
    together = works_together(operations)
    registers = Warps() if together else Threads()
    function = registers.function(operations)
    head = [f'#define KERNEL "{kernel.name}"', f"#define REGISTERS {max(registers.lanes, default=0) + 1}"]
    head.append('#include "machine.h"')
    head += [_bytes(f"bank{bank}", kernel.banks[bank]) for bank in sorted(registers.banks - {0})]
    head += [_bytes(f"global_{name}", kernel.globals[name]) for name in sorted(registers.globals)]
    head.append('#include "warps.h"' if together else '#include "threads.h"')
    if together:  # bank0 is the launch's
        head.append("#define bank0 block->bank0")
    sizes = ", ".join(f"{{{offset}, {size}}}" for offset, size in kernel.parameters) or "{0, 0}"
    tail = [
        f"const int simgpu_parameters = {len(kernel.parameters)}, simgpu_base = {kernel.base};",
        f"const int simgpu_parameter[][2] = {{{sizes}}};",
        f"const int simgpu_shared = {kernel.shared}, simgpu_local = {kernel.frame + STACK};",
    ]
    return "\n".join([*head, function, *tail, ""])


def _with_globals(instruction: Instruction, kernel: Kernel) -> Instruction:
    """With the variable in the place of the 0 that a relocation overwrites."""
    found = kernel.relocations.get(instruction.at)
    if found is None:
        return instruction
    places = [i for i, operand in enumerate(instruction.operands) if operand == Operand("", Integer(0))]
    if instruction.opcode not in ("MOV", "UMOV", "IMAD") or not places:
        raise UnknownInstructionError(f"{instruction.text}: a relocation of {found.symbol}")
    operands = list(instruction.operands)
    operands[places[-1]] = Operand("", Global(*found))
    return instruction._replace(operands=tuple(operands))


def _bytes(name: str, data: bytes) -> str:
    return f"static const u8 {name}[] __attribute__((aligned(16))) = {{{','.join(map(str, data))}}};"


def library(kernel: Kernel, cache: Path, nvdisasm: str) -> Path:
    """The library with a kernel, from the cache if it is there."""
    key = hashlib.sha256(b"\0".join([_own_source(), kernel.code, repr(kernel[2:]).encode()])).hexdigest()[:32]
    made = cache / f"{key}.so"
    if not made.exists():
        source = cache / f"{key}.{os.getpid()}.c"
        text = in_c(kernel, disassembled(nvdisasm, kernel.code))
        source.write_text(text, encoding="utf-8")
        compiled(source, made, "-O1")  # -O2 takes ten times as long for lanes in lockstep
        source.unlink()
    return made


@functools.lru_cache(maxsize=None)
def _own_source() -> bytes:
    modules = [HERE / f"{name}.py" for name in ("decode", "table", "emit", "flow", "threads", "warps", "kernel")]
    return b"".join(path.read_bytes() for path in [*modules, *sorted(HERE.glob("*.h"))])


def compiled(source: Path, made: Path, *flags: str) -> None:
    """Compile C into a library; whoever comes late overwrites it with the same."""
    scratch = made.with_suffix(f".{os.getpid()}")
    command = ["gcc", *FLAGS, *flags, f"-I{HERE}", "-o", scratch, source, "-lm"]
    subprocess.run([str(part) for part in command], check=True)
    scratch.replace(made)


def main() -> None:
    home = Path(os.environ["MXMP_SIMGPU_HOME"])
    if len(sys.argv) == 1:
        made = home / "cache" / hashlib.sha256(_own_source()).hexdigest()[:16]
        made.mkdir(parents=True, exist_ok=True)
        print(made.name)
        return
    name, path = sys.argv[1], "".join(sys.argv[2:])
    try:
        cubin = Path(path) if path else find(home, name)
        (home / "cache").mkdir(exist_ok=True)
        print(library(Cubin(cubin).kernel(name), home / "cache", os.environ["SIMGPU_NVDISASM"]))
    except UnknownInstructionError as error:
        sys.exit(f"simulated GPU: {re.sub(chr(10), ' ', str(error))} in {name}")


if __name__ == "__main__":
    main()
