"""The prefill server: runs prompts, retains their KV blocks under a lease, releases them."""
