"""Placement of requests: load estimates, cached prefixes, and the choice of servers."""
