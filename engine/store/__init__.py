"""The KV store of a host: KV that outlives engines; the program of `baton kv`."""
