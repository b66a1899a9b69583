"""The decode server: admits requests, pulls their KV, verifies it, generates, recovers."""
