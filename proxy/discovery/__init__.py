"""How servers become members: a file, a DNS name, their own registration, an operator."""
