"""The decode server: pulls the KV of prompts, verifies it and generates."""
