"""What a GPU made of it, from what profilers write."""
