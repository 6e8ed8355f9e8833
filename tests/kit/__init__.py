"""What tests of several rooms share: nets, their FP32 twins, drawn graphs, processes."""
