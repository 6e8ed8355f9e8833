"""mxmp: mixed-precision training for Apache MXNet.

``convert(net)`` and ``Trainer(...)`` for Gluon, ``cast_symbol(sym)`` for Symbols: one core decides the
precision of every operator and inserts the casts, FP32 masters and a loss scaler make the step safe.
Importing mxmp changes nothing in MXNet.
"""

try:
    import mxnet as _mxnet
except ImportError as error:
    raise ImportError(
        "mxmp needs Apache MXNet 1.9.1, which cannot be imported here "
        f"({error}). Install one build: pip install 'mxmp[cpu]', or pip install 'mxmp[cu112]' for CUDA 11.2"
    ) from error

from .bucketing import BucketingModule
from .diagnose import explain
from .gluon import convert, restore
from .module import Module
from .policy import Policy
from .scaler import DynamicLossScaler, NoLossScaler, StaticLossScaler
from .symbolic import cast_symbol
from .trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "BucketingModule",
    "DynamicLossScaler",
    "Module",
    "NoLossScaler",
    "Policy",
    "StaticLossScaler",
    "Trainer",
    "cast_symbol",
    "convert",
    "explain",
    "restore",
]

del _mxnet
