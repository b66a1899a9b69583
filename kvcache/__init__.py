"""KV cache memory, the leases on its blocks, and transfers of KV between servers."""
