"""Whether a port is right, and what is left only rounding."""
