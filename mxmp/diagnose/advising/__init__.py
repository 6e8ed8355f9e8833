"""What a GPU's Tensor Cores can make of a network, from shapes alone."""
