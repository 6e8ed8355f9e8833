"""Rewrites of whole graphs for inference, for ``optimize_for_inference`` and for modules that only predict.

============  ================================================================================
``folding``   BatchNorm folded into weights, and operators on parameters alone computed once
``fusing``    MXNet's oneDNN fusion, kept from fusing where the result would be wrong
``lowering``  the graph in bfloat16 or float16, with weights that are stored so
``sums``      FullyConnected with float16 sums, emulated
============  ================================================================================
"""
