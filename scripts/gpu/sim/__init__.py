"""Decode, translate and run CUDA machine code on a CPU."""
