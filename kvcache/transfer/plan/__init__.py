"""Plans a transfer between two KV caches: its pieces, strategy and estimated cost."""
