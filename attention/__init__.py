"""Attention backends: they write and read the paged KV cache."""
