"""Looking inside: what a conversion decided, and why; what a GPU can make of it, and what it made of it."""

from .advise import Advice, advise
from .explain import Explanation, explain
from .load import load
from .profile import Profile, profile
from .profile_picture import plot_profile
from .report import GraphReport
from .roofline import plot_roofline

__all__ = [
    "Advice",
    "Explanation",
    "GraphReport",
    "Profile",
    "advise",
    "explain",
    "load",
    "plot_profile",
    "plot_roofline",
    "profile",
]
