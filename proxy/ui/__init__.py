"""The page at the proxy's /: what the cluster is and does, for people."""
