"""Which dtype each operator computes in, and the graph with casts that says so.

=================  ================================================================================
``graph``          nodes and edges over Symbol JSON; ``subgraphs``: the bodies of control flow
``rules``          what is safe: one row per operator of MXNet, with the reason
``plan``           a decision for every operator of one graph, as plain data; ``tuned``: how tuning found it
``decide``         the plan by the rules
``casts``          a planned graph with its casts, and back
``traffic``        what casts move, and the policy that would move less
``heads``          the loss scale in front of loss heads
=================  ================================================================================
"""
