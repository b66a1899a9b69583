"""The sources of members: a file, a DNS name, registrations, operators."""
