"""The Symbolic frontend: ``cast_symbol``, ``Module`` and ``BucketingModule``."""

from .bucketing import BucketingModule
from .cast import cast_symbol
from .module import Module

__all__ = ["BucketingModule", "Module", "cast_symbol"]
