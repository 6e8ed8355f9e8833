"""Looking inside: what a conversion decided, and why; what trains, over float16's range."""

from .explain import Explanation, explain
from .histogram import Histogram
from .report import GraphReport
from .snapshot import Snapshot, TensorReport
from .watch import Watch, watch

__all__ = [
    "Explanation",
    "GraphReport",
    "Histogram",
    "Snapshot",
    "TensorReport",
    "Watch",
    "explain",
    "watch",
]
