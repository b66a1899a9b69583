"""Triton kernels for mixtures of experts. `fused_ops` decides where they are used."""
