"""The null GPU: stubs of CUDA's libraries that record every call, networks that train on them, and what a step asks."""
