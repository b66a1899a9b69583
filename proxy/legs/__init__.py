"""The legs of a request: what is sent to a server, and what its answer means."""
