"""What moves between two KV caches, in which pieces, by which way, at what cost."""
