"""What ran on a GPU, from what Nsight Systems recorded."""
