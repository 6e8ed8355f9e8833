"""MXNet's CUDA build without a GPU: ``null`` records what it asks for, ``sim`` computes it; and a real Tensor Core."""
