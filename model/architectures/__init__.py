"""Declarations of all architectures, and the reading of config.json, without torch."""
