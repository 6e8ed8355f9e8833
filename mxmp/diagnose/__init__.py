"""Looking inside: what a conversion decided, and why; what trains; what a GPU can make of it, and what it made."""

from .advise import Advice, advise
from .blame import blame
from .blame_report import Blame, Range
from .explain import Explanation, explain
from .histogram import Histogram
from .load import load
from .plots import plot_histograms, plot_steps
from .profile import Profile, profile
from .profile_picture import plot_profile
from .report import GraphReport
from .roofline import plot_roofline
from .scale_plot import plot_loss_scale
from .snapshot import Snapshot, TensorReport
from .summaries import ScaleHandler, SummaryLog, log_scale
from .watch import Watch, watch

__all__ = [
    "Advice",
    "Blame",
    "Explanation",
    "GraphReport",
    "Histogram",
    "Profile",
    "Range",
    "ScaleHandler",
    "Snapshot",
    "SummaryLog",
    "TensorReport",
    "Watch",
    "advise",
    "blame",
    "explain",
    "load",
    "log_scale",
    "plot_histograms",
    "plot_loss_scale",
    "plot_profile",
    "plot_roofline",
    "plot_steps",
    "profile",
    "watch",
]
