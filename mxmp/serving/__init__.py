"""Rewrites of whole graphs for inference, for ``optimize_for_inference`` and for modules that only predict."""
