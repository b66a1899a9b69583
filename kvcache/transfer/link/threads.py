"""What threads that wait for a device or copy KV ask of the system."""

import ctypes

import torch

_PR_SET_TIMERSLACK = 29  # in ns


def allow_short_naps() -> None:
    """Naps of the calling thread end within 1 us of their time, not within Linux's usual 50."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


def use_one_core() -> None:
    """The calling thread's torch operations start no other threads, now or later.

    Any that did would stay. With more OpenMP threads than cores libgomp stops spinning for work,
    and every operation of the engine's own then waits to be woken.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()  # a thread that has asked once keeps its number, whatever others set
