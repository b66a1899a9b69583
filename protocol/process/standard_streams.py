"""Standard input, output and error of a process that was started without some of them."""

import os
import sys


def open_standard_streams() -> None:
    """Opens those that are closed, to nothing. Else a pipe gets one of their numbers, and a child
    that is to inherit it finds its own standard stream there; and `sys.stdout` is None."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is `fd`
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
