"""Looking inside: what a conversion decided, and why; what a GPU can make of it, and what it made of it."""

from .advise import Advice, advise
from .explain import Explanation, explain
from .load import load
from .profile import Profile, profile
from .report import GraphReport

__all__ = ["Advice", "Explanation", "GraphReport", "Profile", "advise", "explain", "load", "profile"]
