"""Checks JSON schemas, and writes them as grammars of the library llguidance."""
