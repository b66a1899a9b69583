"""Soft pins of cached blocks."""
