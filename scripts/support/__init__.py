"""What the tools share: options, results, processes, tables, pictures."""
