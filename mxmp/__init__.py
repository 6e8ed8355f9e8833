"""mxmp: mixed-precision training for Apache MXNet.

``convert(net)`` and ``Trainer(...)`` for Gluon, ``cast_symbol(sym)`` for Symbols: one core decides the
precision of every operator and inserts the casts, FP32 masters and a loss scaler make the step safe.
Importing mxmp changes nothing in MXNet.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

try:
    import mxnet as _mxnet
except (ImportError, AttributeError) as error:  # AttributeError: np.bool, which NumPy 1.24 no longer has
    raise ImportError(
        f"mxmp needs Apache MXNet 1.7.0 to 1.9.1, which cannot be imported here ({error}). Install one build with a "
        "NumPy that it knows: pip install 'mxmp[cpu]' 'numpy<1.24', or pip install 'mxmp[cu112]' 'numpy<1.24' for "
        "CUDA 11.2"
    ) from error

from . import versions as _versions  # isort: skip  # refuses another version before anything else is imported
from .checkpoint import load_checkpoint, save_checkpoint
from .diagnose import explain, guard
from .gluon import BatchProcessor, Trainer, convert, master_weights, restore, set_master_weights
from .inference import optimize_for_inference
from .other_names import error_of as _error_of
from .policy import Policy
from .precision.plan import Plan
from .step.adaptive import AdaptiveLossScaler
from .step.scaler import DynamicLossScaler, NoLossScaler, StaticLossScaler
from .symbolic import BucketingModule, Module, cast_symbol
from .tuning import tune

__version__ = "1.0.0"
__all__ = [
    "AdaptiveLossScaler",
    "BatchProcessor",
    "BucketingModule",
    "DynamicLossScaler",
    "Module",
    "NoLossScaler",
    "Plan",
    "Policy",
    "StaticLossScaler",
    "Trainer",
    "cast_symbol",
    "convert",
    "explain",
    "guard",
    "load_checkpoint",
    "master_weights",
    "optimize_for_inference",
    "restore",
    "save_checkpoint",
    "set_master_weights",
    "tune",
]

del _mxnet, _versions


if not _TYPE_CHECKING:  # for a type checker every name would exist

    def __getattr__(name: str) -> object:
        """Raise ``AttributeError`` for a name that mxmp lacks, or ``ImportError``, with what to write instead."""
        raise _error_of(name, __all__)
