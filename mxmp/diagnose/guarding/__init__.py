"""Moves layers that overflow again and again to FP32, while the network trains."""
