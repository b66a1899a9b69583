"""Triton kernels of whole parts of a model; used where fused_ops says."""
