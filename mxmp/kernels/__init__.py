"""Workarounds for kernels of MXNet, oneDNN and cuDNN that fail, give wrong numbers or are slow: a table and its loop.

``table`` has an entry for each, ``fit`` applies them to a graph, and the other files have the rewrites.
"""
