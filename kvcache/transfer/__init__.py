"""Moves KV from a prefill server's pool (P) into a decode server's pool (D)."""
