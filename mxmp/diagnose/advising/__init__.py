"""Which operators fit a GPU's Tensor Cores, from shapes alone."""
