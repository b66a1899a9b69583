"""Starts Baton: the `baton` command, local clusters, containers; and its tools."""
