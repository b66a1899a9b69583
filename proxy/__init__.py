"""One OpenAI-compatible endpoint in front of prefill and decode servers."""
