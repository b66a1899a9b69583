"""Declares all architectures and parses config.json. Does not import torch."""
