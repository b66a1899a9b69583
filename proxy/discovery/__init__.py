"""Where the proxy's members come from: files, DNS names, registrations, operators."""
