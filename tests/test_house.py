"""The house: which module may import which, where its test is, and that importing mxmp changes nothing in MXNet."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import mxnet as mx
import pytest
from mxnet import gluon
from mxnet.gluon.contrib import estimator

import mxmp
import mxmp.gluon._mxnet
import mxmp.symbolic._mxnet

PACKAGE = Path(mxmp.__file__).parent
# A room imports what stands further up, a file of a room also what stands further up in it. The two doors
# stand on one floor and know nothing of each other.
HOUSE = {
    "host": ["versions", "cpu", "files", "pictures", "callbacks", "child", "__init__"],
    "": ["launch", "policy"],
    "messages": [
        *("text", "callers", "keywords", "shapes", "inputs", "refusals", "retraced", "converted"),
        *("networks", "files", "other_names"),
        "__init__",
    ],
    "workers": ["sitecustomize", "__init__"],
    "precision": [
        *("_mxnet", "rule", "rule_table", "missing_kernels", "rules", "safe_sums", "graph", "subgraphs", "tuned"),
        *("plan_file", "plan", "renaming", "operators", "needs", "cost", "decide", "edited", "inputs", "casts"),
        *("traffic", "heads", "monitoring", "__init__"),
    ],
    "kernels": [
        *("inserting", "layouts", "rounding", "emulation", "norms", "padding", "unwritten", "cuda"),
        *("memory", "channels_last", "table", "fit", "fusion", "__init__"),
    ],
    "spine": ["pipeline", "observed"],
    "serving": ["folding", "fusing", "sums", "lowering", "__init__"],
    "step": [
        *("_mxnet", "scaler", "adaptive", "ledger", "gradients", "floor", "multi_tensor", "masters"),
        *("horovod", "stores", "python_operators", "statistics", "fingerprint", "step"),
        *("state_layout", "optimizer_data", "resume", "prepared_updates", "updater", "state_file", "states"),
        "__init__",
    ],
    "gluon": [
        *("_mxnet", "nesting", "tracing", "broadcasting", "known", "as_arrays", "scopes", "following", "reads"),
        *("reachable", "blocks", "changes", "remembered", "parameter", "conversion", "record", "scaling"),
        *("scaled_heads", "scaled_reads", "unconverted_heads", "static_shape", "monitored", "graphs", "symbols"),
        *("untraceable", "hook", "convert", "backward", "trainer", "estimator", "weights", "__init__"),
    ],
    "symbolic": [
        "_mxnet",
        "cast",
        "checkpoint",
        "reading",
        "parameters",
        "core",
        "inference",
        "monitored",
        "module",
        "bucketing",
        "__init__",
    ],
    "tuning": [
        *("cut", "stand_ins", "job", "choices", "clock", "machine", "table", "search", "process", "tune"),
        "__init__",
    ],
    "inference": [
        *("calibration", "quantizing", "report", "worker", "runner", "prepared", "targets", "search", "optimize"),
        "__init__",
    ],
    "diagnose/networks": ["protocol", "stand_ins", "probe"],
    "diagnose/networks/of_gluon": ["_mxnet", "undoing", "training", "replaying", "reading", "plain", "__init__"],
    "diagnose/networks/of_symbolic": ["_mxnet", "training", "replaying", "reading", "plain", "__init__"],
    "diagnose/networks, of both": ["frontends", "__init__"],
    "diagnose, shared": ["text"],
    "diagnose/watching": ["histogram", "snapshot", "watch", "__init__"],
    "diagnose/auditing": ["report", "arrays", "lost", "still", "segments", "replays", "audit", "__init__"],
    "diagnose/blaming": ["report", "verdict", "recording", "cure", "blame", "__init__"],
    "diagnose/advising": ["gemm", "flops", "gpus", "machine", "advice", "advise", "__init__"],
    "diagnose/verifying": [
        "_mxnet",
        "recording",
        "folder",
        "judging",
        "reasons",
        "report",
        "modes",
        "running",
        "porting",
        "rounding",
        "verify",
        "__init__",
    ],
    "diagnose": ["explaining", "profiling", "guarding", "plots", "__init__"],
    "top": ["checkpoint", "__init__", "__main__"],
}
# Folders whose files are of several rooms.
PARTS = {"": ("", "spine", "top"), "diagnose": ("diagnose, shared", "diagnose")}
PARTS["diagnose/networks"] = ("diagnose/networks", "diagnose/networks, of both")
# Of a frontend each: neither knows the other.
DOORS = {"gluon", "symbolic"}
NETWORKS = {f"diagnose/networks/of_{door}": door for door in DOORS}
WITHOUT_MXNET = ["cpu", "files", "wrong_files", "pictures", "callbacks", "child", "launch", "policy"]
WITHOUT_MXNET += ["workers/sitecustomize"]
WITHOUT_MXNET += [f"precision/{name}" for name in ("rule", "rule_table", "missing_kernels", "rules")]
WITHOUT_MXNET += [f"step/{name}" for name in ("scaler", "adaptive", "ledger")]
WITHOUT_MXNET += [f"diagnose/watching/{name}" for name in ("histogram", "snapshot")]
WITHOUT_MXNET += ["inference/report"]
WITHOUT_MXNET += ["diagnose/auditing/report", *(f"diagnose/{name}" for name in ("text", "profiling", "plots"))]
WITHOUT_MXNET += [f"diagnose/advising/{name}" for name in ("gemm", "gpus", "machine", "advice")]
FILES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def place(module: str) -> tuple[str, str]:
    """Room and file of a module such as ``step/scaler``."""
    folder, _, name = module.rpartition("/")
    return next((room for room in PARTS.get(folder, ()) if name in HOUSE[room]), folder), name


@lru_cache(maxsize=None)
def nodes(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))))


def imports(module: str) -> tuple[set[tuple[str, str]], set[str]]:
    """Room and file of everything in mxmp that a module imports, and top-level packages from outside.

    Imports for types only count as well.
    """
    ours, others = set(), set()
    here = module.split("/")[:-1]
    for node in nodes(module):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
            stem = "/".join(filter(None, base))
            for alias in node.names:
                full = f"{stem}/{alias.name}".lstrip("/")
                ours.add(place(full if full in FILES else stem if stem in FILES else f"{stem}/__init__"))
        elif isinstance(node, ast.ImportFrom):
            others.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
    return ours, others


def test_the_house_lists_every_file():
    assert {place(module) for module in FILES} == {(room, name) for room, names in HOUSE.items() for name in names}


@pytest.mark.parametrize("module", FILES)
def test_imports_point_up_the_house(module):
    room, name = place(module)
    ours, others = imports(module)
    rooms = list(HOUSE)
    above = set(rooms[: rooms.index(room)]) - (DOORS if room in DOORS else set())
    files = HOUSE[room][: HOUSE[room].index(name)]
    assert {found for found in ours if found[0] not in above and not (found[0] == room and found[1] in files)} == set()
    assert "mxmp" not in others
    if module in WITHOUT_MXNET:
        assert "mxnet" not in others


@pytest.mark.parametrize("module", [m for m in FILES if m.startswith("diagnose/")])
def test_diagnose_knows_a_network_only_by_the_protocol(module):
    """Its two implementations know one frontend each, and one file of ``diagnose`` knows which a network is of."""
    room, name = place(module)
    frontends = {found for found, _ in imports(module)[0]} & (DOORS | NETWORKS.keys())
    if name != "frontends":
        assert frontends <= {room, NETWORKS.get(room)}


# -- The homes --------------------------------------------------------------------------------------

ROOT = PACKAGE.parent
# A home imports only homes that stand before it. A test imports none for which LAB stands, but for those in a folder
# named scripts, which are tests of the lab, the checks and the commands themselves.
LAB = ("scripts", "scripts/lab", "scripts/checks")
HOMES = ("mxmp", "examples", "scripts/support", "scripts/gpu", *LAB, "tests")


def home(path: Path) -> str:
    """Return the home of a file or folder of this repository: the longest whose name its path begins with."""
    name = path.relative_to(ROOT).as_posix()
    return max((home for home in HOMES if f"{name}/".startswith(f"{home}/")), key=len)


def homes_imported(path: Path, paths: list[Path]) -> set[tuple[str, str]]:
    """Return the homes of what a file imports by absolute names, each with the name; ``paths``: where Python looks."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found = set()
    for name in names:
        for folder in (path.parent, *paths):
            source = folder.joinpath(*name.split("."))
            if source.with_suffix(".py").exists() or (source / "__init__.py").exists():
                found.add((home(source), name))
                break
    return found


@pytest.fixture(scope="module")
def paths(pytestconfig):
    return [*map(Path, pytestconfig.getini("pythonpath")), ROOT, ROOT / "examples" / "recipes"]


@pytest.mark.parametrize("name", HOMES)
def test_a_home_imports_only_those_before_it(name, paths):
    files = [path for path in (ROOT / name).rglob("*.py") if home(path) == name]
    assert files
    for path in files:
        allowed = {*HOMES[: HOMES.index(name) + 1]}
        if name == "tests" and "scripts" not in path.relative_to(ROOT).parts:
            allowed -= {*LAB}
        wrong = [found for where, found in homes_imported(path, paths) if where not in allowed]
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_no_script_puts_the_tests_where_python_looks():
    statements = {
        (path.relative_to(ROOT).as_posix(), ast.unparse(node))
        for path in (ROOT / "scripts").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)) and "sys.path" in ast.unparse(node)
    }
    assert statements  # dev.py and demo.py have some
    assert [each for each in statements if "tests" in each[1]] == []


def test_the_walk_finds_the_home_of_an_import(tmp_path, paths):
    lines = {
        "import mxmp.step": "mxmp",
        "from imagenet_common import network": "examples",
        "from support import results": "scripts/support",
        "from gpu.null.record import recording": "scripts/gpu",
        "import dev": "scripts",
        "from scripts.lab import sweep": "scripts/lab",
        "from bench.turns import gain": "scripts/lab",
        "from checks import words": "scripts/checks",
        "def later():\n    from kit import twins": "tests",
    }
    for line, where in lines.items():
        (tmp_path / "file.py").write_text(line, encoding="utf-8")
        assert {found for found, _ in homes_imported(tmp_path / "file.py", paths)} == {where}, line


# -- The tests --------------------------------------------------------------------------------------

TESTS = ROOT / "tests"
# Folders of tests that are of no one module of mxmp.
CROSSING = ("features", "docs", "examples", "gpu", "nullgpu", "simgpu", "scripts", "kit")
# Modules without a test file of their name, and where they are tested.
ELSEWHERE = {
    r"messages/\w+": "what is said of what is typed: features/test_messages.py",
    r"precision/edited": "test_edited_plans.py",
    r"precision/(plan_file|renaming)": "plans are saved, loaded and renamed in test_plan.py",
    r"(precision|step|gluon|symbolic)/_mxnet": "its package uses each name, and fails in a MXNet without it",
    r"diagnose/networks/(of_\w+/\w+|protocol|stand_ins)": "each diagnostic's tests run through both frontends",
    r"diagnose/blaming/(recording|report)": "what test_blame.py and test_verdict.py read",
    r"diagnose/verifying/(judging|modes|porting|reasons|recording)": "the parts of one answer: test_verify.py",
    r"gluon/scaled_heads": "what a forward remembers and a backward sets is held in test_scaling.py",
    r"gluon/following": "what test_scopes.py runs",
    r"gluon/(symbols|monitored)": "what plans and served graphs trace, and what test_monitoring.py hears",
    r"symbolic/reading": "what is written is read back in test_checkpoint.py, damaged files in test_broken_files.py",
    r"step/optimizer_data": "what a file has of an optimizer is held in test_resume.py",
    r"step/horovod": "its workers run in test_distributed.py",
    r"observed": "what the monitors and probes of test_monitoring.py and test_probe.py report",
    r"inference/worker|workers/sitecustomize": "the other side of test_runner.py and of test_launch.py",
}
SMALL = 30


def code_of(path: Path) -> int:
    """Return the number of lines with code: no blank ones, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    said = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            said |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and i not in said for i, line in lines)


def file_of_tests(module: str) -> str:
    folder, _, name = module.rpartition("/")
    return f"{folder}/test_{name.strip('_')}.py".lstrip("/")


def test_each_module_has_a_test_file_of_its_name_and_each_test_file_a_module():
    """A reader finds the test of a module, and of what crosses modules, by the names of folders and files."""
    modules = {module for module in FILES if not module.endswith("__init__")}
    lacking = {m for m in modules if not (TESTS / file_of_tests(m)).exists() and code_of(FILES[m]) > SMALL}
    assert {module for module in lacking if not any(re.fullmatch(name, module) for name in ELSEWHERE)} == set()
    assert [name for name in ELSEWHERE if not any(re.fullmatch(name, module) for module in lacking)] == []
    found = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    found = {path.as_posix() for path in found if path.parts[0] not in CROSSING}
    assert found - {file_of_tests(module) for module in modules} == {"test_house.py"}


# -- MXNet's private attributes ---------------------------------------------------------------------


def private_accesses(module: str) -> set[tuple[str, str]]:
    """Underscored attributes that a module reads or writes: the object, as it is written, and the name."""
    found = set()
    for node in nodes(module):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value
            found.add((owner.id if isinstance(owner, ast.Name) else "another object", node.attr))
    return found


INHERITED = {
    name
    for door in (mxmp.gluon._mxnet, mxmp.symbolic._mxnet)
    for names in door.INHERITED.values()
    for name in names.split()
}


OWN = ("self", "cls", "super")
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields"}


@pytest.mark.parametrize("module", [m for m in FILES if not m.endswith("_mxnet")])
def test_nobody_reads_the_underscored_attribute_of_another_object(module):
    """What another room or class needs has a name without an underscore; what is MXNet's is in ``_mxnet.py``."""
    others = {(owner, name) for owner, name in private_accesses(module) if owner not in OWN}
    assert {(owner, name) for owner, name in others if name not in OF_NAMED_TUPLES} == set()


@lru_cache(maxsize=None)
def own_names() -> set[str]:
    """The underscored attributes that classes of mxmp define or assign on ``self`` and ``cls``."""
    found = set()
    for module in FILES:
        for node in nodes(module):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", item)]
                    found |= {getattr(target, "id", getattr(target, "name", "")) for target in targets}
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


@pytest.mark.parametrize("module", [m for m in FILES if not m.endswith("_mxnet")])
def test_what_a_class_inherits_from_mxnet_and_is_private_is_listed(module):
    used = {name for owner, name in private_accesses(module) if owner in OWN}
    assert used - own_names() - INHERITED == set()


@pytest.mark.parametrize(
    ("subclass", "base"),
    [
        ("Trainer", gluon.Trainer),
        ("LowParameter", gluon.Parameter),
        ("BatchProcessor", estimator.BatchProcessor),
        ("Module", mx.mod.Module),
        ("BucketingModule", mx.mod.BucketingModule),
    ],
)
def test_what_our_classes_inherit_exists(subclass, base, request):
    listed = {**mxmp.gluon._mxnet.INHERITED, **mxmp.symbolic._mxnet.INHERITED}[subclass].split()
    made = request.getfixturevalue(f"a_{base.__name__.lower()}")
    assert [name for name in listed if not hasattr(made, name)] == []


@pytest.fixture
def a_parameter():
    param = gluon.Parameter("p", shape=(2,))
    param.initialize()
    return param


@pytest.fixture
def a_trainer(a_parameter):
    return gluon.Trainer([a_parameter], "sgd", kvstore=None)


@pytest.fixture
def a_batchprocessor():
    return estimator.BatchProcessor()


@pytest.fixture
def a_module():
    module = mx.mod.Module(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2), label_names=None)
    module.bind([("data", (1, 2))])
    return module


@pytest.fixture
def a_bucketingmodule():
    def generate(key):
        return mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2), ["data"], None

    return mx.mod.BucketingModule(generate, 1)


# -- State ------------------------------------------------------------------------------------------

MUTABLE = ("WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "RLock", "Lock", "local", "count", "deque")


def module_state(module: str) -> set[int]:
    """The lines at which a module makes an object that changes and belongs to no net, trainer or module."""
    found = set()
    for node in ast.parse(FILES[module].read_text(encoding="utf-8")).body:
        value = getattr(node, "value", None) if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        made = value.func if isinstance(value, ast.Call) else None
        changes = made is not None and ast.unparse(made).rpartition(".")[2] in MUTABLE
        if isinstance(node, ast.AnnAssign) and isinstance(value, (ast.Dict, ast.List, ast.Set)):
            changes = not node.target.id.isupper()  # a constant
        if changes:
            found.add(node.lineno)
    return found


@pytest.mark.parametrize("module", FILES)
def test_state_of_a_module_has_its_reason(module):
    """State belongs to a net, a trainer or a module; what is global says why, in a comment above it."""
    lines = FILES[module].read_text(encoding="utf-8").splitlines()
    for number in module_state(module):
        above = number - 2
        while lines[above - 1].startswith("#"):
            above -= 1
        assert lines[above].startswith("# Global"), f"{module}, line {number}: {lines[number - 1]}"


# -- Importing --------------------------------------------------------------------------------------

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


@pytest.mark.slow
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
