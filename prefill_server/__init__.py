"""The prefill server: runs prompts and leases their KV to other servers."""
