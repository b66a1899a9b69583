"""Model weights and maths, independent of batching and of the KV cache's layout."""
