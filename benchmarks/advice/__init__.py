"""`baton bench advise`: predicts the goodput of replicas and of splits."""
