"""The Gluon frontend: ``convert``, ``restore``, ``Trainer`` and ``BatchProcessor``."""

from .convert import convert, restore
from .estimator import BatchProcessor
from .trainer import Trainer

__all__ = ["BatchProcessor", "Trainer", "convert", "restore"]
