"""Triton kernels for mixtures of experts and for products of few rows.

`fused_ops` decides where they are used.
"""
