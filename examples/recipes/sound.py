"""Recorded speech that ships inside a Debian package, and its spectrograms. Not a recipe.

60 words (numbers, days, months and others) spoken by Allison Smith, 48 seconds at 8 kHz: asterisk-core-sounds-en-wav,
licence CC BY-SA 3.0. The package is fetched as those of ``data.py`` are.
"""

from __future__ import annotations

import wave

import numpy as np
from data import debian_package

# What is said in the files digits/0.wav, digits/1.wav ..., by their names.
WORDS = """
0 zero 1 one 2 two 3 three 4 four 5 five 6 six 7 seven 8 eight 9 nine 10 ten 11 eleven 12 twelve 13 thirteen
14 fourteen 15 fifteen 16 sixteen 17 seventeen 18 eighteen 19 nineteen 20 twenty 30 thirty 40 forty 50 fifty 60 sixty
70 seventy 80 eighty 90 ninety day-0 sunday day-1 monday day-2 tuesday day-3 wednesday day-4 thursday day-5 friday
day-6 saturday mon-0 january mon-1 february mon-2 march mon-3 april mon-4 may mon-5 june mon-6 july mon-7 august
mon-8 september mon-9 october mon-10 november mon-11 december at at billion billion dollars dollars hundred hundred
million million minus minus oclock oclock pound pound star star thousand thousand today today tomorrow tomorrow
yesterday yesterday
"""


def recordings() -> dict[str, np.ndarray]:
    """Spoken words: FP32 samples in (-1, 1) at 8 kHz by their spelling, without the silence around them."""
    folder = debian_package("asterisk-core-sounds-en-wav") / "usr/share/asterisk/sounds/en_US_f_Allison/digits"
    table, found = WORDS.split(), {}
    for name, word in zip(table[::2], table[1::2]):
        with wave.open(str(folder / f"{name}.wav")) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype("float32") / 2**15
        loud = np.flatnonzero(np.abs(samples) > 0.01)
        found[word] = samples[max(loud[0] - 200, 0) : loud[-1] + 400]
    return found


def spectrogram(sound: np.ndarray, bands: int, hop: int = 160, window: int = 400, rate: int = 8000) -> np.ndarray:
    """Log energies of shape (bands, frames): ``bands`` triangles, evenly spread on the mel scale."""
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(sound, window // 2), window)[::hop]
    energy = np.abs(np.fft.rfft(frames * np.hanning(window), axis=1)) ** 2
    mel = np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), bands + 2)
    edges = 700 * (10 ** (mel / 2595) - 1) / rate * window
    bins = np.arange(energy.shape[1])[:, None]
    up, down = (bins - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - bins) / np.diff(edges)[1:]
    return np.log(energy @ np.clip(np.minimum(up, down), 0, None) + 1e-4).T.astype("float32")
