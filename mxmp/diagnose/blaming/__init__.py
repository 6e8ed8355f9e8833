"""The first operator that made an inf or NaN."""
