"""The web page at the proxy's path /, which shows the servers and their work."""
