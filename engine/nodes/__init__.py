"""Servers with several nodes. A node is a host on which ranks of the server run."""
