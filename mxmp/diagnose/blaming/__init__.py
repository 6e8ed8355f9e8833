"""Which operator first made an inf or NaN."""
