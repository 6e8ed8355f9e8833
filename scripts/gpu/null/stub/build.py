"""Builds libnullgpu.so, under all names by which libmxnet.so looks for CUDA's libraries.

    python build.py FOLDER

Functions that ``*.c`` beside this file do not define are made here, by their names: they succeed and do nothing. Those
that compute are recorded, those that only create, set or ask are not.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
FLAGS += ["-Wno-unused-parameter", "-Wno-missing-field-initializers"]
OF_CUDA = re.compile(r" U ((?:cu[a-zA-Z]|__cuda|nccl|nvtx)\w+)(?:@(\S+))?")
IDLE = re.compile(
    r"__cuda|cuda(?!Graph)|cuGraph|nvtx|nccl(Comm|Group)|"
    r"\w*(Create|Destroy|Set[A-Z]|Get[A-Z]|Restore|Plan|SetClip)"
)


def main() -> None:
    out = Path(sys.argv[1])
    found = importlib.util.find_spec("mxnet")
    if found is None or found.origin is None:
        sys.exit("error: MXNet, whose libmxnet.so says which functions it calls, is not installed here.")
    library = Path(found.origin).with_name("libmxnet.so")
    sources = sorted(HERE.glob("*.c"))
    read = [*sources, *HERE.glob("*.h"), Path(__file__)]
    size, changed = library.stat().st_size, library.stat().st_mtime_ns
    built_from = hashlib.sha256(b"".join(p.read_bytes() for p in read) + f"{size} {changed}".encode()).hexdigest()
    stamp = out / "built-from"
    if stamp.exists() and stamp.read_text() == built_from:
        return
    out.mkdir(parents=True, exist_ok=True)
    wanted = OF_CUDA.findall(output("nm", "-D", "--undefined-only", "--with-symbol-versions", library))
    objects = [compiled(source, out) for source in sources]
    written = set(re.findall(r" T (\w+)", output("nm", "--defined-only", *objects)))
    missing = [name for name, _ in wanted if name not in written]
    (out / "others.c").write_text(
        '#include "record.h"\nint ng_call(const char *);\n' + "".join(map(definition, missing)), encoding="utf-8"
    )
    (out / "versions.map").write_text(version_script(wanted), encoding="utf-8")
    run(
        *("gcc", "-shared", "-o", out / "libnullgpu.so", *objects, compiled(out / "others.c", out)),
        *(f"-Wl,--version-script={out / 'versions.map'}", "-Wl,-soname,libnullgpu.so"),
        *("-lstdc++", "-lpthread", "-ldl", "-lm"),
    )
    for name in re.findall(r"\[(lib(?:cu|nccl|nvTools)\S+)\]", output("readelf", "-d", library)):
        link = out / name
        link.unlink(missing_ok=True)
        link.symlink_to("libnullgpu.so")
    stamp.write_text(built_from)
    print(f"null GPU: {len(wanted)} functions of CUDA, {len(wanted) - len(missing)} written, {len(missing)} empty")


def definition(name: str) -> str:
    body = "return 0;" if IDLE.match(name) else f'return ng_call("{name}");'
    return f"API int {name}(void) {{ {body} }}\n"


def version_script(wanted: list[tuple[str, str]]) -> str:
    """The versions that libmxnet.so binds the functions in; all else is hidden from it."""
    functions: dict[str, list[str]] = {}
    for name, version in wanted:
        functions.setdefault(version or "NULLGPU", []).append(f"{name};")
    functions.setdefault("NULLGPU", []).append("ng_*; local: *;")
    return "".join(f"{version} {{ global: {' '.join(names)} }};\n" for version, names in functions.items())


def compiled(source: Path, out: Path) -> Path:
    made = out / f"{source.stem}.o"
    run("gcc", *FLAGS, f"-I{HERE}", "-c", source, "-o", made)
    return made


def output(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
