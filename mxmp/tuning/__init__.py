"""Which precision is fast: measured plans.

================  ================================================================================
``cut``           the assignment of dtypes with the least total cost, exactly
``choices``       what there is to choose, and the bytes that casts move
``clock``         how long operators take in their place in the network, and whole steps
``table``         these times by signature; ``machine``: where they are kept
``search``        learn, cut, and let whole steps decide; ``tune``: the door to it
================  ================================================================================
"""

from .tune import tune

__all__ = ["tune"]
