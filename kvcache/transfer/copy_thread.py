"""A thread that copies KV on the CPU, by itself."""

from concurrent.futures import ThreadPoolExecutor

import torch


def copy_thread(name: str) -> ThreadPoolExecutor:
    """One thread whose torch operations use no other threads.

    One core copies at most of memory's speed. Sharing a copy among OpenMP threads makes each wait
    for the others to be scheduled: where the engine keeps the cores busy, 7 ms instead of 0.4 for
    a block of 4 MiB.
    """
    # A thread that has asked once keeps its number, whatever others set; the caller's stays.
    torch.get_num_threads()
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=use_one_core)


def use_one_core() -> None:
    """The calling thread's torch operations start no other threads, now or later.

    Any that did would stay. With more OpenMP threads than cores libgomp stops spinning for work,
    and every operation of the engine's own then waits to be woken: 47 ms a decode step, not 37.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()
