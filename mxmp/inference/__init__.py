"""Graphs for inference on a CPU: BatchNorm folded, operators fused, in the fastest dtype that is accurate enough.

=================  ================================================================================
``optimize``       the public function
``folding``        BatchNorm folded into weights, and operators on parameters alone computed once
``fusing``         MXNet's oneDNN fusion, kept from fusing where the result would be wrong
``lowering``       the graph in bfloat16, or in float16 for a GPU
``quantizing``     the graph in INT8, by MXNet's own passes
``calibration``    the ranges of tensors for INT8, and the signal to quantization noise ratio (SQNR)
``worker``         the process in which candidate graphs run
``runner``         the object in the user's process that starts and asks this process
``targets``        reads networks and calibration data, makes the blocks and Symbols that are returned
``search``         which graphs are tried, and which one is chosen
``report``         the results of a search as data, text and picture
=================  ================================================================================
"""

from .optimize import optimize_for_inference

__all__ = ["optimize_for_inference"]
