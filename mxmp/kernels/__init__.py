"""What the kernels of a device need to be right and fast: a table of workarounds, applied in one loop.

=================  ================================================================================
``table``          one row a workaround: the fault, its source, where it applies, the rewrite, its test
``fit``            the loop over the table
``emulation``      float16 on a CPU, as a Tensor Core computes it
``norms``          BatchNorm between casts, and inside cuDNN's kernel
``rounding``       bfloat16 that rounds
``layouts``        layouts of oneDNN's that fail or are slow
``padding``        wrong weight gradients around small inputs
``fusion``         graphs without MXNet's own oneDNN fusion
``unwritten``      outputs and gradients that are left as they were
=================  ================================================================================
"""
