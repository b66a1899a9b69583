"""`baton chat`: a conversation with an OpenAI-compatible endpoint in the terminal."""
