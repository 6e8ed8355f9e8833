"""The hook of commit messages: a subject has at most 72 characters."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).resolve().parents[2] / ".pre-commit-config.yaml"
LONG = "x" * 73


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    shutil.copy(CONFIG, folder)
    for command in (["init", "-q"], ["add", CONFIG.name]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "code"),
    [
        (f"{LONG[1:]}\n", 0),
        (f"step: short\n\n{LONG}: the reason may be longer\n", 0),
        (f"{LONG}\n", 1),
        (f"{LONG}\n\nThe reason.\n", 1),
    ],
    ids=["72", "a long line below", "73", "73 and a reason"],
)
def test_a_subject_has_at_most_72_characters(message, code, repository, monkeypatch):
    monkeypatch.setenv("PRE_COMMIT_HOME", str(repository / ".home"))
    (repository / "message").write_text(message, encoding="utf-8")
    hook = ["-m", "pre_commit", "run", "subject", "--hook-stage", "commit-msg", "--commit-msg-filename", "message"]
    run = subprocess.run([sys.executable, *hook], cwd=repository, capture_output=True, text=True, check=False)
    assert run.returncode == code, run.stdout + run.stderr
    assert "at most 72 characters" in run.stdout
