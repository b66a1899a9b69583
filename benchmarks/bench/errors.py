"""The error of `baton bench` that ends the command with one line."""


class BenchError(RuntimeError):
    """The command cannot start or continue. The message names the cause and the fix."""
