"""Drafters that read hidden states of the model for which they propose tokens."""
