"""`baton bench`: load on OpenAI endpoints, comparison of endpoints, and advice."""
