"""Moves KV from a prefill server's pool into a decode server's pool."""
