"""Triton kernels of attention. Only machines with a GPU have Triton."""
