"""Graphs for inference on a CPU: BatchNorm folded, operators fused, in the fastest dtype that is accurate enough.

=================  ================================================================================
``optimize``       the public function
``calibration``    the ranges of tensors for INT8, and how near outputs are to FP32's, column by column
``quantizing``     the graph in INT8, by MXNet's own passes
``worker``         the process in which candidate graphs run
``runner``         the object in the user's process that starts and asks this process
``prepared``       runs a graph that is returned, with weights that are prepared once
``targets``        reads networks and calibration data, makes the blocks and Symbols that are returned
``search``         which graphs are tried, and which one is chosen
``report``         the results of a search as data, text and picture
=================  ================================================================================

The rewrites of graphs that it tries, other than INT8, are in ``mxmp.serving``.
"""

from .optimize import optimize_for_inference

__all__ = ["optimize_for_inference"]
