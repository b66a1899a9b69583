"""Measurements; each ends in one JSON line."""
