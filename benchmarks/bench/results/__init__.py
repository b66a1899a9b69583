"""What a run of `baton bench` is reported as: figures, a verdict, an HTML report."""
