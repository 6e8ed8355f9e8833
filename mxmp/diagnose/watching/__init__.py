"""The tensors of a training step, compared with the range of the compute dtype."""
