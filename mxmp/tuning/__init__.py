"""Which precision is fast: measured plans.

================  ================================================================================
``cut``           the assignment of dtypes with the least total cost, exactly
``choices``       what there is to choose, and the bytes that casts move
================  ================================================================================
"""
