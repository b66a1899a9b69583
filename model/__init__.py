"""Models: weights and computation, independent of batching and KV cache layout."""
