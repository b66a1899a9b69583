"""Carries out block copies with torch, with a kernel or with copy engines.

The source of a copy is mapped memory of a peer, or staging memory.
"""
