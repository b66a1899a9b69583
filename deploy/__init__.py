"""Launching: the `baton` command, local clusters, containers."""
