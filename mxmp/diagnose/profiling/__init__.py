"""A GPU's kernels, from a recording of Nsight Systems."""
