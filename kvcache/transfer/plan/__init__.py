"""Planning of a transfer between two KV caches: pieces, strategy and estimated cost."""
