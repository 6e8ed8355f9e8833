"""Which precision is fast: measured plans.

``tune`` describes a network as data (``job``). Another process (``process``) runs the ``search``: it times operators
(``clock``, ``table``), finds the assignment of dtypes with the least cost (``cut``), and compares whole steps.
"""

from .tune import tune

__all__ = ["tune"]
