"""Which dtype each operator computes in, and the graph with casts that says so.

=================  ================================================================================
``graph``          nodes and edges over Symbol JSON; ``subgraphs``: the bodies of control flow
``rules``          what is safe, from two tables of rows with their reasons: ``rule_table``, what each operator of
                   MXNet is safe in, and ``missing_kernels``, what a device lacks
``plan``           a decision for every operator of one graph, as plain data; ``tuned``: how tuning found it
``decide``         the plan by the rules
``casts``          a planned graph with its casts, and back
``traffic``        how many bytes the casts read and write
``heads``          the loss scale for loss heads, which a scaled loss does not reach
``monitoring``     what MXNet's monitor reports of the graph with casts, in the names and values of the FP32 graph
=================  ================================================================================
"""
