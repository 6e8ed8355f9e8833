"""The report of ``optimize_for_inference``: which graphs were tried, which was chosen and why, as data and as text."""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Dict, List, NamedTuple, Optional, Tuple

from ..files import replacing
from ..pictures import new_figure, save_figure

_ROWS = 10
_MARKERS = "osD^v"
_COLORS = "blue", "green", "purple", "brown", "gray", "olive", "cyan"


class Candidate(NamedTuple):
    """One graph that ``optimize_for_inference`` tried.

    Attributes
    ----------
    name : str
        Such as ``"float32, fused"``, or ``"int8, 3 in float32"``: INT8 but for three layers.
    milliseconds : float or None
        Median time of a run on the first batch. None if the graph was not timed: it is not accurate enough, or fails,
        or ``dtypes`` is ``"float16"``, with which no graph is timed.
    gain : tuple of float or None
        How many times as fast as the report's baseline: lower quartile, median and upper quartile over the rounds, in
        each of which every timed graph runs once. None if the graph was not timed.
    sqnr : float or None
        The signal to quantization noise ratio in dB against the network in FP32, of the output for which it is lowest,
        on the batches that measure accuracy (for an FP32 graph, on all batches). All values of an output count as one
        signal, and their mean is a part of it. None if the graph could not run.
    column_sqnr : float or None
        That of the column for which it is lowest, in which the column's mean is no signal: ``min_sqnr`` is compared
        with it. The columns of an output are along axis 1 where it has four axes or more, otherwise along the last one.
        The variance of a column over few rows is small by chance, which is allowed for. None if the graph could not
        run.
    agreement : float or None
        The share of rows, from 0 to 1, whose largest value is in the same column as in FP32, in the output of scores
        for which it is lowest. Outputs of scores have several columns and two axes, or more if a dense layer, a
        convolution, a product or a softmax gives them. None if there is no such output, for the unchanged FP32 network,
        or if the graph could not run.
    score : float or None
        What ``evaluate`` returned for the graph. None if there is no ``evaluate``, if the graph could not run, and for
        every FP32 graph but one: ``"float32, folded"`` (BatchNorm folded into the layers before it, where that is
        right), or ``"float32"`` if that candidate has a verdict. Graphs in other dtypes are compared with its score.
    verdict : str
        Why the graph may not be returned, such as ``"below 20 dB"``; empty if it may.
    """

    name: str
    milliseconds: Optional[float] = None
    gain: Optional[Tuple[float, float, float]] = None
    sqnr: Optional[float] = None
    column_sqnr: Optional[float] = None
    agreement: Optional[float] = None
    score: Optional[float] = None
    verdict: str = ""


class Layer(NamedTuple):
    """One operator of the chosen graph.

    Attributes
    ----------
    name, op : str
        The operator's name (in INT8, that before the quantization; of several fused ones, that of the last), and its
        type in MXNet, such as ``"_sg_mkldnn_conv"``.
    dtype : str
        ``"int8"`` if the operator was quantized, otherwise the dtype of its output, such as ``"bfloat16"``. In a graph
        for a GPU, the dtype that it computes in: ``"float16"`` or ``"float32"``.
    why : str
        Why it has this dtype.
    sqnr : float or None
        The signal to quantization noise ratio of the worst column, in dB, if this operator alone is in the dtype
        with which the chosen graph's name begins, INT8 for ``"int8, 3 in float32"``; for a GPU, in float16. None if
        that was not measured.
    milliseconds : float or None
        Time of the operator for one batch, when operators run one after another. None if it was not measured.
    fused : tuple of str
        The names of the operators of the network that are fused in it, ``("conv0", "relu0")``; empty if it is one.
    """

    name: str
    op: str
    dtype: str
    why: str
    sqnr: Optional[float] = None
    milliseconds: Optional[float] = None
    fused: Tuple[str, ...] = ()


@dataclass(frozen=True)
class InferenceReport:
    """How ``optimize_for_inference`` found the graph that it returned; ``print(report)`` shows it as a table.

    Attributes
    ----------
    chosen : str
        The name of the candidate, that is the tried graph, that was returned.
    baseline : str
        The name of the fastest FP32 candidate, against which speed is measured. With ``dtypes="float16"`` nothing is
        timed, and the baseline is ``"float32, folded"``, or ``"float32"`` if the former may not be returned (its
        ``verdict`` says why).
    candidates : list of Candidate
        All graphs that were tried.
    layers : list of Layer
        The operators of the chosen graph, in graph order.
    calibrators : dict of str to float
        From the name of each way to choose the ranges of INT8, such as ``"entropy"``, to the signal to quantization
        noise ratio in dB, of the worst column, of the network with all operators in INT8 that can be. The ranges with
        the highest ratio were used. Empty if no INT8 graph ran, or if the first, by smallest and largest value, did not
        pay.
    notes : list of str
        Sentences on what is not faster here, could not be made, or was left out.
    """

    chosen: str
    baseline: str
    candidates: List[Candidate]
    layers: List[Layer]
    calibrators: Dict[str, float]
    notes: List[str]

    def save(self, path: str) -> None:
        """Write the report to the file ``path`` as JSON, with the attributes' names as keys.

        Infinity is written as ``Infinity``, as Python's ``json`` reads it. After an ``OSError`` the file is as it was.
        """
        raw = asdict(self)
        raw["candidates"] = [each._asdict() for each in self.candidates]
        raw["layers"] = [each._asdict() for each in self.layers]
        with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            json.dump(raw, file, indent=1)

    def plot(self, path: Optional[str] = None) -> object:
        """Return a matplotlib ``Figure`` with a dot for each timed candidate: time of a batch against SQNR in dB.

        SQNR is the signal to quantization noise ratio; infinity is drawn above all others. The chosen candidate is a
        red star. With ``dtypes="float16"`` nothing is timed, and there is no dot.

        Parameters
        ----------
        path : str, optional
            A file to write the picture to as well. Its name ends with .png, .svg or .pdf.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        ValueError
            The path does not end with .png, .svg or .pdf.
        """
        figure = new_figure(8, 4.5)
        axis = figure.subplots()
        dots = [(each.name, each.milliseconds, each.sqnr) for each in self.candidates]
        timed = [(name, time, ratio) for name, time, ratio in dots if time is not None and ratio is not None]
        finite = [ratio for _, _, ratio in timed if ratio < math.inf] or [100.0]
        top = max(finite) + 0.15 * (max(finite) - min(finite) or 100.0)
        for number, (name, time, ratio) in enumerate(timed):
            is_chosen = name == self.chosen
            marker = "*" if is_chosen else _MARKERS[number % len(_MARKERS)]
            color = "red" if is_chosen else _COLORS[number % len(_COLORS)]
            size = 14 if is_chosen else 8
            axis.plot(time, min(ratio, top), marker, label=name, markersize=size, color=f"tab:{color}", alpha=0.8)
        if any(ratio == math.inf for _, _, ratio in timed):
            below = [tick for tick in axis.get_yticks() if min(finite) <= tick <= max(finite)] or [min(finite)]
            axis.set_yticks([*below, top], [*(f"{tick:.4g}" for tick in below), "∞"])
        axis.set(xlabel="time of a batch, ms", ylabel="SQNR against FP32, dB", title=f"served: {self.chosen}")
        axis.margins(x=0.1, y=0.1)
        if timed:
            axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)
        return save_figure(figure, path)

    def __str__(self) -> str:
        """Return a table of the candidates, ten operators (the slowest, or the first if not timed), and the notes."""
        head = ("", "ms", "times as fast", "SQNR, dB", "worst column", "same answer", "score", "")
        rows = [head, *(self._row(each) for each in self.candidates)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        timed = any(each.gain for each in self.candidates)
        text = [f"Served: {self.chosen}" + (f"; times as fast as {self.baseline}" if timed else ", for a GPU")]
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
        counts = Counter(layer.dtype for layer in self.layers)
        text.append(f"Operators: {', '.join(f'{number} {dtype}' for dtype, number in counts.items())}")
        for layer in sorted(self.layers, key=lambda layer: -(layer.milliseconds or 0))[:_ROWS]:
            alone = "" if layer.sqnr is None else f", alone {layer.sqnr:.1f} dB"
            time = "" if layer.milliseconds is None else f"{layer.milliseconds:.3f} ms  "
            text.append(f"  {time}{layer.dtype:<8}  {' + '.join(layer.fused) or layer.name}: {layer.why}{alone}")
        return "\n".join([*text, *self.notes])

    def _row(self, each: Candidate) -> Tuple[str, ...]:
        gain = "" if each.gain is None else "{1:.2f} ({0:.2f} to {2:.2f})".format(*each.gain)
        return (
            ("* " if each.name == self.chosen else "  ") + each.name,
            "" if each.milliseconds is None else f"{each.milliseconds:.2f}",
            gain,
            "" if each.sqnr is None else f"{each.sqnr:.1f}",
            "" if each.column_sqnr is None else f"{each.column_sqnr:.1f}",
            "" if each.agreement is None else f"{each.agreement:.1%}",
            "" if each.score is None else f"{each.score:.4g}",
            each.verdict,
        )
