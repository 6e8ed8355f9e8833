"""The Gluon frontend: ``convert``, ``restore``, ``Trainer`` and ``BatchProcessor``."""

from .convert import convert, restore
from .trainer import BatchProcessor, Trainer

__all__ = ["BatchProcessor", "Trainer", "convert", "restore"]
