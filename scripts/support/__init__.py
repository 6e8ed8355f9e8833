"""What scripts and tests share: results, processes, tables, and the networks and operators that both try."""
