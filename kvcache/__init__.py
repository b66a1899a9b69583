"""Where KV bytes live and how they travel between servers."""
