"""Graphs for inference on a CPU: folded, fused where that is right, and in the fastest dtype that is accurate enough.

=================  ================================================================================
``folding``        BatchNorm into weights, and what only parameters feed computed once
``fusing``         MXNet's own oneDNN fusion, kept from where it is wrong
``lowering``       the graph in bfloat16; ``quantizing``: in INT8, by MXNet's own passes
``calibration``    ranges for INT8, and the SQNR
``worker``         the process in which candidates run; ``runner``: the user's end of it
``targets``        nets and Symbols in, blocks and Symbols to serve out
``search``         what is tried, what is right, what is fast; ``report``: all that as data
=================  ================================================================================
"""

from .optimize import optimize_for_inference

__all__ = ["optimize_for_inference"]
