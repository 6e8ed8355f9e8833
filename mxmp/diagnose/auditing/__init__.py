"""Which low-precision operators change what this network computes from these data."""
