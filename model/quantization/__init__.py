"""Weights that stay quantised: their layout, their formats in files, and products."""
