"""Which server gets a request: load estimates, prefix caches, and the choice."""
