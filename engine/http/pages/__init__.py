"""Handlers of paths that generate no text."""
