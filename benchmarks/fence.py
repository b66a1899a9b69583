"""What the fence costs: `python -m benchmarks.fence`.

P is a process, D another, on one host without GPUs; pulls of `--tokens` tokens go through D's
coordinator and worker and P's lease thread, out of P's mapped memory. Pulls whose fence is P's word
in shared memory and pulls that ask P take turns. Times, in us, medians:

    fence   the worker saw the last byte -> the engine is told that the fence was passed
    pull    the order to read -> the fence was passed
    woken   the order to read -> the thread that ordered runs again

The last line is one JSON document.
"""

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.transfer import Side, Size
from benchmarks.transfer_cuda_rig import SECRET, WAIT_S, Answers, compat, new_agent, serve
from kvcache.pool import KVPool
from kvcache.transfer.coordinator import PullCoordinator
from kvcache.transfer.held_leases import HeldLeases
from kvcache.transfer.host_mapper import HostMapper
from kvcache.transfer.mapped import MappedPath
from kvcache.transfer.pull import PullDone
from kvcache.transfer.pull_worker import PullWorker
from kvcache.transfer.rank_links import InsideLink
from protocol.handshake import EngineMetadata
from protocol.messages import RemotePrefill

SIDE = Side("BHLCND", 1, 16, 1, True)


class TimedMapper(HostMapper):
    """Says when a launch was last seen to have ended."""

    seen_at = 0.0

    def finished(self, token: Any) -> bool:
        ended = super().finished(token)
        if ended:
            self.seen_at = time.perf_counter()
        return ended


class Blind(HeldLeases):
    """A reader that can open nobody's words."""

    def meet(self, metadata: EngineMetadata) -> None:
        pass


@dataclass
class Times:
    """Of pulls, in us."""

    fence: list[float] = field(default_factory=list)
    pull: list[float] = field(default_factory=list)
    woken: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(values), 1) for name, values in vars(self).items()}


class DecodeEnd:
    """One rank of D, in this process."""

    def __init__(self, size: Size, *, asks: bool) -> None:
        self._blocks = SIDE.blocks(size).tolist()
        self._woken = threading.Event()
        self._told_at = 0.0
        self._count = 0
        self.times = Times()
        pool = KVPool(SIDE.endpoints(size)[0].layout)
        self._mapper = TimedMapper(pool)
        link = InsideLink()
        address = "tcp://127.0.0.1:0"
        self._coordinator = PullCoordinator(
            address, 1, compat(size), SECRET, on_event=self._told, inside={0: link}
        )
        if asks:
            self._coordinator._held_leases = Blind()
        agent, mapped = new_agent("bench-d", "cpu"), MappedPath(self._mapper, required=True)
        self._worker = PullWorker(
            0, 1, size.heads, agent, pool, address, mapped=mapped, inside=link
        )
        self._coordinator.start()
        self._worker.start()

    def _told(self) -> None:
        self._told_at = time.perf_counter()
        self._woken.set()

    def pull(self, remote: RemotePrefill, tokens: int) -> PullDone:
        self._count += 1
        self._coordinator.hold(str(self._count), remote)
        time.sleep(0.002)  # the first renewal, which no pull waits for
        started = time.perf_counter()
        blocks = self._blocks[: -(-tokens // SIDE.block_size)]
        self._coordinator.pull(str(self._count), remote, 0, tokens, blocks)
        while True:
            if not self._woken.wait(WAIT_S):
                raise RuntimeError(f"no event within {WAIT_S} s")
            woken = time.perf_counter() - started
            self._woken.clear()
            for event in self._coordinator.drain():
                if not isinstance(event, PullDone):
                    raise RuntimeError(f"the pull failed: {event}")
                self.times.fence.append((self._told_at - self._mapper.seen_at) * 1e6)
                self.times.pull.append(event.seconds * 1e6)
                self.times.woken.append(woken * 1e6)
                return event

    def close(self) -> None:
        self._coordinator.close()
        self._worker.close()


def measure(answers: Answers, size: Size, repeat: int) -> dict[str, dict[str, float]]:
    answers.ask(SIDE)
    ends = {"word": DecodeEnd(size, asks=False), "asked": DecodeEnd(size, asks=True)}
    for end in ends.values():
        for _ in range(10):
            end.pull(answers.ask(size.tokens), size.tokens)
        end.times = Times()
    for _ in range(repeat):
        for kind, end in ends.items():
            done = end.pull(answers.ask(size.tokens), size.tokens)
            if done.fence != kind:
                raise RuntimeError(f"the fence was {done.fence}, not {kind}")
    for end in ends.values():
        end.close()
    return {kind: end.times.medians() for kind, end in ends.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=200)
    args = parser.parse_args()
    size = Size(tokens=args.tokens, layers=4, heads=2, head_dim=64, dtype="bfloat16")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, "cpu", size), daemon=True)
    process.start()
    found = measure(Answers(here), size, args.repeat)
    here.send(None)
    process.join(WAIT_S)
    for kind, times in found.items():
        print(f"{kind:6}", *(f"{name} {value:7.1f} us" for name, value in times.items()))
    print(json.dumps({"benchmark": "fence", "tokens": args.tokens, "repeat": args.repeat, **found}))


if __name__ == "__main__":
    main()
