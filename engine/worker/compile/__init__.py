"""Compiles the Triton kernels of a model before rank 0 of a host needs them."""
