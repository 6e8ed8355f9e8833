"""Which dtype each operator computes in, and the graph with casts that says so.

``rule_table`` and ``missing_kernels`` say what is safe; ``decide`` and ``readers`` make a ``plan`` of it for one
``graph``; ``casts`` writes the plan into the graph; ``heads`` scales the gradients of loss heads.
"""
