"""The files of a model: safetensors, GGUF, and the scales of FP8 KV in checkpoints."""
