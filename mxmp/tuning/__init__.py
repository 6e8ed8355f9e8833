"""Which precision is fast: measured plans.

``tune`` checks what it is given and describes it as data (``job``); a process of its own measures (``process``), and
the plan comes back.

=============  ===================================================================================
``cut``        finds the assignment of dtypes with the least total cost, exactly
``stand_ins``  takes the place of operators that only the user's process knows
``choices``    says what there is to choose, and which bytes casts move
``job``        describes a network and what its plan is for, as data for another process
``clock``      measures how long operators take in their place in the network, and steps
``table``      holds these times by signature; ``machine``: where they are kept
``search``     learns, cuts, and lets steps decide
``process``    runs the search in a process of its own, which may crash
=============  ===================================================================================
"""

from .tune import tune

__all__ = ["tune"]
