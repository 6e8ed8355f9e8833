"""Diagnostics: what a conversion decided, what happens in training, what a GPU's Tensor Cores can and did compute.

All of them leave the training as it is, except ``guard``, which is public as ``mxmp.guard`` too, beside ``Trainer``.
"""

from .advising.advice import Advice
from .advising.advise import advise
from .auditing.audit import audit
from .auditing.report import Audit, Change, Finding
from .blaming.blame import blame
from .blaming.report import Blame, Range
from .explaining import Explanation, GraphReport, explain
from .guarding import Guard, Moved, guard
from .plots import plot_histograms, plot_loss_scale, plot_verification
from .profiling import Profile, profile
from .verifying.judging import Course, Departure
from .verifying.report import Verification
from .verifying.verify import verify
from .watching.histogram import Histogram
from .watching.snapshot import Snapshot, TensorReport
from .watching.watch import Watch, watch

__all__ = [
    "Advice",
    "Audit",
    "Blame",
    "Change",
    "Course",
    "Departure",
    "Explanation",
    "Finding",
    "GraphReport",
    "Guard",
    "Histogram",
    "Moved",
    "Profile",
    "Range",
    "Snapshot",
    "TensorReport",
    "Verification",
    "Watch",
    "advise",
    "audit",
    "blame",
    "explain",
    "guard",
    "plot_histograms",
    "plot_loss_scale",
    "plot_verification",
    "profile",
    "verify",
    "watch",
]
