"""Which server gets the next request: pure, (servers, last choice) -> choice."""

from collections.abc import Callable, Sequence


def round_robin(urls: Sequence[str], last: str | None, usable: Callable[[str], bool]) -> str | None:
    """The first usable server after `last` in the circle of `urls`, `last` itself at the end."""
    start = urls.index(last) + 1 if last in urls else 0
    circle = [*urls[start:], *urls[:start]]
    return next((url for url in circle if usable(url)), None)


def choose(
    urls: Sequence[str],
    last: str | None,
    *,
    ready: Callable[[str], bool],
    admits: Callable[[str], bool],
) -> str | None:
    """Round robin over ready servers whose circuit admits a request, else over all ready ones."""
    return round_robin(urls, last, lambda url: ready(url) and admits(url)) or round_robin(
        urls, last, ready
    )
