"""Nodes: the hosts on which the ranks of one server run."""
