"""The `baton` command with its tools, local clusters, and container files."""
