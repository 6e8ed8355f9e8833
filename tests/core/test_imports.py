"""The house: which module may import which, and that importing mxmp changes nothing in MXNet."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mxmp

PACKAGE = Path(mxmp.__file__).parent
# A module imports modules further up only.
ORDER = [
    *("policy", "rules", "graph", "plan", "rewrite", "lower", "heads"),
    *("scaler", "gradients", "fresh", "running", "masters", "step", "layouts", "states", "kvstores"),
    *("block", "gluon", "trainer", "estimator", "symbolic", "module_states", "module", "bucketing"),
    *("diagnose", "__main__", "__init__"),
]
DOORS = [{"block", "gluon", "trainer", "estimator"}, {"symbolic", "module_states", "module", "bucketing"}]
WITHOUT_MXNET = ["policy", "rules", "scaler"]


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Top-level modules of mxmp that a file imports, and top-level packages from outside."""
    ours, others = set(), set()
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            ours |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            others.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
    return ours, others


def files() -> dict[Path, str]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path: path.relative_to(PACKAGE).with_suffix("").parts[0] for path in paths}


FILES = files()


def test_every_module_has_its_place_in_the_house():
    assert set(FILES.values()) - set(ORDER) == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_up_the_list(path):
    module = FILES[path]
    ours, others = imports(path)
    above = ORDER[: ORDER.index(module)]
    assert ours - set(above) - {module} == set()
    assert "mxmp" not in others
    for door in DOORS:
        if module in door:
            assert ours & (set().union(*DOORS) - door) == set()
    if module in WITHOUT_MXNET:
        assert "mxnet" not in others


SNAPSHOT = """
import os, sys, warnings
import mxnet as mx
from mxnet import gluon
import mxnet.module, mxnet.contrib.amp

def snapshot():
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] != "mxnet" or module is None:
            continue
        for key, value in vars(module).items():
            found[name, key] = id(value)
            if isinstance(value, type) and value.__module__.startswith("mxnet"):
                for attr, member in vars(value).items():
                    found[name, key, attr] = id(member)
    return found

net = gluon.nn.Dense(2, in_units=2)
net.initialize()
net(mx.nd.ones((1, 2))).asnumpy()
before, filters, environment = snapshot(), list(warnings.filters), dict(os.environ)
import mxmp
assert "mxmp.gluon" in sys.modules
def check():
    after = snapshot()
    changed = {k for k in before if after.get(k) != before[k]} | {k for k in after if k not in before}
    print(sorted(map(str, changed)))
    assert not changed
    assert warnings.filters == filters and dict(os.environ) == environment

check()
mxmp.convert(net)
net(mx.nd.ones((1, 2))).asnumpy()
mxmp.cast_symbol(mx.sym.FullyConnected(mx.sym.var("x"), num_hidden=2))
check()
"""


def test_importing_and_using_mxmp_patches_nothing_in_mxnet():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SNAPSHOT],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_without_mxnet_the_error_names_the_extras():
    code = "import sys; sys.modules['mxnet'] = None; import mxmp"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode != 0
    assert "ImportError" in run.stderr
    assert "mxmp[cpu]" in run.stderr
    assert "mxmp[cu112]" in run.stderr


def test_what_the_package_exports_exists():
    for name in mxmp.__all__:
        assert getattr(mxmp, name) is not None
