"""Writing and reading the paged KV cache."""
