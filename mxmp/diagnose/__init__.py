"""Looking inside: what a conversion decided, and why."""

from .explain import Explanation, explain
from .report import GraphReport

__all__ = ["Explanation", "GraphReport", "explain"]
