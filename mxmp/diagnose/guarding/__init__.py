"""Moves layers that have overflowed in several steps to FP32, while the network trains."""
