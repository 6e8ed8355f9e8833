"""The tensors of a training step, over the low dtype's range."""
