"""Which dtype each operator computes in, and the graph that does so.

``pipeline.low_graph`` is the spine: strip → decide → insert casts → fit to the device.

=================  ================================================================================
``graph``          nodes and edges over Symbol JSON; ``subgraphs``: the bodies of control flow
``rules``          what is safe: one row per operator of MXNet, with the reason
``plan``           a decision for every operator of one graph, as plain data; ``tuned``: how tuning found it
``decide``         the plan by the rules
``casts``          a planned graph with its casts, and back
``devices``        the graph for a device's kernels; ``emulation``: float16 on a CPU; ``onednn``, ``padding``,
                   ``unwritten``: what its CPU kernels need to be right
``traffic``        what casts move, and the policy that would move less
``heads``          the loss scale in front of loss heads
=================  ================================================================================
"""
