"""The results of a run of `baton bench`: figures, a verdict, an HTML report."""
