"""Texts in two halves as BERT reads them: rows of ids, of which words may be hidden. Not a recipe.

The texts are those of ``data.py``, which names their licences.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
from data import UNKNOWN, Vocabulary

LENGTH, BATCH, HIDDEN_WORDS, VOCABULARY = 28, 32, 4, 2500
MASK, SPLIT = UNKNOWN, 3  # ids: a hidden word is an unknown one; a separator stands between the halves


def numbered(texts: list[tuple]) -> tuple[list[tuple], list[int]]:
    """Ids of the words of both halves of each text, and the numbers of the texts to train on."""
    train = [n for n in range(len(texts)) if n % 10]
    vocabulary = Vocabulary([half for n in train for half in texts[n]], VOCABULARY)
    return [(vocabulary.ids(first), vocabulary.ids(second)) for first, second in texts], train


def whole(halves: list, n: int, second: list | None = None) -> tuple:
    """Ids, types, length and the place 0 of a sentence, whose second half may be another's."""
    first, second = halves[n][0], halves[n][1] if second is None else second
    ids = [2, *first, SPLIT, *second, SPLIT]
    types = [0] * (len(first) + 2) + [1] * (LENGTH - len(first) - 2)
    return np.array(ids + [0] * (LENGTH - len(ids))), np.array(types), len(ids), np.zeros(HIDDEN_WORDS)


def masked(halves: list, n: int, random: np.random.RandomState) -> tuple:
    """As ``whole``, with hidden words: their places and ids, and 1 if the second half is the first one's own."""
    follows = random.rand() < 0.5
    ids, types, length, _ = whole(halves, n, None if follows else halves[random.randint(len(halves))][1])
    places = random.choice(np.flatnonzero((ids > 3) | (ids == UNKNOWN)), HIDDEN_WORDS)
    hidden = ids[places].copy()
    ids[places] = MASK
    return ids, types, length, places, hidden, float(follows)


def columns(rows: list[tuple]) -> list[mx.nd.NDArray]:
    made = [mx.nd.array(np.stack(column)) for column in zip(*rows)]
    return [*made[:3], made[3].astype("int32"), *made[4:]]


def parts(rows: list[tuple]):
    return (columns(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH))
