"""Which precision is fast: measured plans.

``tune`` checks what it is given and describes it as data (``job``); a process of its own measures (``process``), and
the plan comes back.

=============  ===================================================================================
``cut``        finds the assignment of dtypes with the least total cost, exactly
``stand_ins``  replaces operators that only the user's process can run
``choices``    says which operators may compute in either dtype, and how many bytes casts move
``job``        describes a network and what its plan is for, as data for another process
``clock``      measures how long operators take in their place in the network, and steps
``table``      holds these times; ``machine`` says in which file they are kept
``search``     profiles some plans, cuts, and compares whole steps of the best
``process``    runs the search in a process of its own, which may crash
=============  ===================================================================================
"""

from .tune import tune

__all__ = ["tune"]
