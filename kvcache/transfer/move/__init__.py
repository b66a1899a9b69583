"""Moving block copies by torch, by a kernel or by copy engines.

The source is mapped memory of a peer, or staging memory.
"""
