"""Weights that stay quantised: what they are, how files hold them, and products by them."""
