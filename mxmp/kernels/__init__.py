"""Workarounds for kernels of MXNet, oneDNN and cuDNN that fail, give wrong numbers or are slow: a table and its loop.

=================  ================================================================================
``table``          one row a workaround: the fault, its source, the rewrite, its test
``fit``            the loop over the table
``workaround``     the classes of a row and of the graph that is rewritten
``emulation``      float16 on a CPU, as a Tensor Core computes it
``norms``          casts around BatchNorm, which are part of cuDNN's kernel
``rounding``       bfloat16 kernels that truncate, lose gradients or sum them in bfloat16
``layouts``        memory layouts in which oneDNN's kernels fail or are slow
``padding``        wrong weight gradients around small inputs
``fusion``         a Symbol that binds without MXNet's oneDNN fusion
``memory``         the order in which a backward computes gradients, so that it needs less memory
``unwritten``      outputs and gradients that kernels do not write
``cuda``           operators that fail, or sum in float16, on a GPU
=================  ================================================================================
"""
