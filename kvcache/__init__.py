"""The memory of KV caches, leases of it, and its transfer between servers."""
