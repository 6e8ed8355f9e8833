"""Looking inside: what a conversion decided, and why."""

from .explain import Explanation, GraphReport, explain

__all__ = ["Explanation", "GraphReport", "explain"]
