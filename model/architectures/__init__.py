"""What each architecture declares, and how a config.json is read: no torch here."""
