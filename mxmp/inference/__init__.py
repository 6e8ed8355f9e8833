"""Graphs for inference on a CPU: BatchNorm folded, operators fused, in the fastest dtype that is accurate enough.

``search`` tries graphs (``quantizing``, ``mxmp.serving``) in another process (``runner`` and ``worker``) and compares
outputs with FP32's (``calibration``). ``targets`` reads networks, and makes what is returned (``prepared``).
"""

from .optimize import optimize_for_inference

__all__ = ["optimize_for_inference"]
