"""The engine of a server: scheduling, steps, rank workers and the HTTP process."""
