"""The sources of the proxy's members: files, DNS names, registrations, operators."""
