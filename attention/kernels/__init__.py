"""Triton kernels of attention, which only machines with a GPU have."""
