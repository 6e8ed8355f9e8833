"""The Gluon frontend: ``convert``, ``restore``, ``Trainer`` and ``BatchProcessor``."""

from .convert import convert, restore
from .estimator import BatchProcessor
from .trainer import Trainer
from .weights import master_weights, set_master_weights

__all__ = ["BatchProcessor", "Trainer", "convert", "master_weights", "restore", "set_master_weights"]
