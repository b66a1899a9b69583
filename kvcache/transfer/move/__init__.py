"""Carries out block copies into the pool, with torch, a kernel or copy engines.

The source of a copy is a peer's mapped memory, or staging memory.
"""
