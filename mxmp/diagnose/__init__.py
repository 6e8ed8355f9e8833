"""Looking inside: what a conversion decided, and why; what a GPU can make of it."""

from .advise import Advice, advise
from .explain import Explanation, explain
from .report import GraphReport

__all__ = ["Advice", "Explanation", "GraphReport", "advise", "explain"]
