"""Which dtype each operator computes in, and the graph with casts that says so.

=================  ================================================================================
``graph``          nodes and edges over Symbol JSON; ``subgraphs``: the bodies of control flow
``rules``          what is safe, from two tables of rows with their reasons: ``rule_table``, what each operator of
                   MXNet is safe in, and ``missing_kernels``, what a device lacks
``plan``           a decision for every operator of one graph, as plain data; ``tuned``: how tuning found it
``decide``         the plan by the rules
``casts``          a planned graph with its casts, and back
``traffic``        what casts move, and the policy that would move less
``heads``          a scale in front of loss heads, for a scaled loss does not reach them
=================  ================================================================================
"""
