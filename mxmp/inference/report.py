"""What was tried, what was chosen and why: plain data, its text and its picture."""

import json
import math
import os
from dataclasses import asdict, dataclass
from typing import Dict, List, NamedTuple, Optional, Tuple

from ..files import replacing

__all__ = ["Candidate", "InferenceReport", "Layer"]

_ROWS = 10


class Candidate(NamedTuple):
    """One graph that was tried.

    Attributes
    ----------
    name : str
    milliseconds : float or None
        Median time of a batch; None where it was not timed.
    gain : tuple of float or None
        How many times as fast as the baseline in the same round: quartiles and median.
    sqnr : float or None
        Of the outputs against FP32's, in dB, on data that calibrated nothing.
    agreement : float or None
        Share of the top answers that are FP32's; None where an output is no table of scores.
    score : float or None
        What ``evaluate`` returned.
    verdict : str
        Why it may not be served; empty where it may.
    """

    name: str
    milliseconds: Optional[float] = None
    gain: Optional[Tuple[float, float, float]] = None
    sqnr: Optional[float] = None
    agreement: Optional[float] = None
    score: Optional[float] = None
    verdict: str = ""


class Layer(NamedTuple):
    """One operator of the graph that is served: its dtype and why, the SQNR of the outputs where it alone is in INT8
    (or bfloat16), and its time, measured operator by operator.
    """

    name: str
    op: str
    dtype: str
    why: str
    sqnr: Optional[float] = None
    milliseconds: Optional[float] = None


@dataclass(frozen=True)
class InferenceReport:
    """How a served graph was found.

    Attributes
    ----------
    chosen, baseline : str
        Names of candidates. The baseline is the faster of FP32 as it was and FP32 folded and fused.
    candidates : list of Candidate
    layers : list of Layer
        Of the chosen graph.
    calibrators : dict of str to float
        SQNR in dB of the network with all of it in INT8, by calibrator.
    notes : list of str
        What does not pay, could not be had, or was left out.
    """

    chosen: str
    baseline: str
    candidates: List[Candidate]
    layers: List[Layer]
    calibrators: Dict[str, float]
    notes: List[str]

    def save(self, path: str) -> None:
        """Write JSON; the file appears whole or not at all."""
        raw = asdict(self)
        raw["candidates"] = [each._asdict() for each in self.candidates]
        raw["layers"] = [each._asdict() for each in self.layers]
        with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            json.dump(raw, file, indent=1)

    def plot(self, path: Optional[str] = None) -> object:
        """Return a picture (matplotlib) of time against SQNR with a dot for each candidate; write it to ``path``.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        ValueError
            The path does not end with .png, .svg or .pdf.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(f"pictures need matplotlib ({error}): pip install 'mxmp[plots]'") from error
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axis = figure.subplots()
        dots = [(each, each.milliseconds, each.sqnr) for each in self.candidates]
        timed = [(each, time, ratio) for each, time, ratio in dots if time is not None and ratio is not None]
        most = max([ratio for _, _, ratio in timed if ratio < math.inf] or [100.0])
        for each, time, ratio in timed:
            color = "tab:red" if each.name == self.chosen else "tab:blue"
            axis.plot(time, min(ratio, most), "o", color=color)
            axis.annotate(each.name, (time, min(ratio, most)), (5, 4), textcoords="offset points", fontsize=8)
        axis.set(xlabel="time of a batch, ms", ylabel="SQNR against FP32, dB", title=f"served: {self.chosen}")
        axis.margins(x=0.2, y=0.15)
        if path is not None:
            kind = os.path.splitext(path)[1][1:]
            if kind not in ("png", "svg", "pdf"):
                raise ValueError(f"{path!r} is no picture: expected a name that ends with .png, .svg or .pdf")
            with replacing(path) as temporary:
                figure.savefig(temporary, format=kind, dpi=110)
        return figure

    def __str__(self) -> str:
        head = ("", "ms", "times as fast", "SQNR, dB", "same answer", "score", "")
        rows = [head, *(self._row(each) for each in self.candidates)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        text = [f"Served: {self.chosen}; times as fast as {self.baseline}"]
        for row in rows:
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1])),
                row[-1],
            ]
            text.append("  ".join(cells).rstrip())
        if self.calibrators:
            found = ", ".join(f"{name} {value:.1f}" for name, value in self.calibrators.items())
            text.append(f"All in INT8, by calibrator, dB: {found}")
        counts: Dict[str, int] = {}
        for layer in self.layers:
            counts[layer.dtype] = counts.get(layer.dtype, 0) + 1
        text.append(f"Operators: {', '.join(f'{number} {dtype}' for dtype, number in counts.items())}")
        slowest = sorted(self.layers, key=lambda layer: -(layer.milliseconds or 0))[:_ROWS]
        for layer in slowest:
            alone = "" if layer.sqnr is None else f", alone {layer.sqnr:.1f} dB"
            text.append(f"  {layer.milliseconds or 0:.3f} ms  {layer.dtype:<8}  {layer.name}: {layer.why}{alone}")
        return "\n".join([*text, *self.notes])

    def _row(self, each: Candidate) -> Tuple[str, ...]:
        gain = "" if each.gain is None else "{1:.2f} ({0:.2f} to {2:.2f})".format(*each.gain)
        return (
            ("* " if each.name == self.chosen else "  ") + each.name,
            "" if each.milliseconds is None else f"{each.milliseconds:.2f}",
            gain,
            "" if each.sqnr is None else f"{each.sqnr:.1f}",
            "" if each.agreement is None else f"{each.agreement:.1%}",
            "" if each.score is None else f"{each.score:.4g}",
            each.verdict,
        )
