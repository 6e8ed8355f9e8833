"""Looking inside: what a conversion decided, and why; what trains, over float16's range."""

from .blame import blame
from .blame_report import Blame, Range
from .explain import Explanation, explain
from .histogram import Histogram
from .plots import plot_histograms, plot_steps
from .report import GraphReport
from .scale_plot import plot_loss_scale
from .snapshot import Snapshot, TensorReport
from .summaries import ScaleHandler, SummaryLog, log_scale
from .watch import Watch, watch

__all__ = [
    "Blame",
    "Explanation",
    "GraphReport",
    "Histogram",
    "Range",
    "ScaleHandler",
    "Snapshot",
    "SummaryLog",
    "TensorReport",
    "Watch",
    "blame",
    "explain",
    "log_scale",
    "plot_histograms",
    "plot_loss_scale",
    "plot_steps",
    "watch",
]
