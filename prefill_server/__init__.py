"""The prefill server: computes prompts and leases their KV to other servers."""
