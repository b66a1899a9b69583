"""The KV store of a host (`baton kv`), which keeps KV when engines end."""
