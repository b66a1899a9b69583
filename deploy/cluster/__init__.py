"""The programs of the cluster of `baton up`: where they run, restarts, and scaling."""
