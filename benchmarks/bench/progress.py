"""A progress bar on standard error, only if that is a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from benchmarks.bench.endpoint import Timeline


class Progress:
    """Counts finished and failed requests."""

    def __init__(self, bar: "tqdm[None]") -> None:
        self._bar = bar
        self._num_failed = 0

    def on_end(self, timeline: Timeline) -> None:
        self._num_failed += not timeline.succeeded
        if self._num_failed:
            self._bar.set_postfix(failed=self._num_failed, refresh=False)
        self._bar.update()


@contextmanager
def progress(num_requests: int) -> Iterator[Progress]:
    """Show how many of the requests have ended, until the block ends."""
    with tqdm(
        total=num_requests,
        unit="request",
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield Progress(bar)
