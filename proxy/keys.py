"""The proxy's API keys: those of options, and a file of keys with limits.

The file has a JSON object on each line; empty lines and those that begin with # are left out.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from protocol.errors import RateLimited
from protocol.http.access import (
    OPEN_PATHS,
    Access,
    Key,
    digest,
    option_keys,
    rate_headers,
)
from protocol.metrics import Metrics
from protocol.process.logging import get_logger
from protocol.settings.settings import ProxySettings

logger = get_logger(__name__)

LOOK_INTERVAL_S = 2.0
MAX_KEYS = 10_000
MAX_FILE_BYTES = 1 << 23
MINUTE_S = 60.0
_FIX = 'write a JSON object a line, {"name": "me", "key": "..."}'


class Line(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key as the file has it. None: no limit."""

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.@-]{1,64}\Z")]
    key: Annotated[str, Meta(min_length=8, max_length=1024)] | None = (
        None  # its digest is kept
    )
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-fA-F]{64}\Z")] | None = None
    requests_per_minute: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    tokens_per_minute: Annotated[int, Meta(ge=1, le=10**12)] | None = None
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    min_priority: int | None = None
    admin: bool = False


class _Minute:
    """What was used of so much a minute, all of which may be used at once. What takes more than all
    is let through where nothing is used, and paid for by those after it."""

    def __init__(self, unit: str, clock: Callable[[], float]) -> None:
        self._unit, self._clock = unit, clock
        self._full_at_s = 0.0  # when all may be used again

    def charge(self, name: str, amount: int, per_minute: int) -> dict[str, str]:
        now_s, step_s = self._clock(), MINUTE_S / per_minute
        used_s, takes_s = max(0.0, self._full_at_s - now_s), amount * step_s
        wait_s = used_s + min(takes_s, MINUTE_S) - MINUTE_S
        if is_free := wait_s < 1e-6:
            used_s += takes_s
            self._full_at_s = now_s + used_s
        left = math.floor(max(0.0, MINUTE_S - used_s) / step_s + 1e-6)
        texts = (f"{per_minute}", f"{left}", f"{used_s:.3f}s")
        headers = dict(zip(rate_headers(self._unit), texts, strict=True))
        if is_free:
            return headers
        headers["retry-after"] = f"{math.ceil(wait_s)}"
        told = f"{name} may send {per_minute} {self._unit} a minute: wait for {wait_s:.3f} s"
        raise RateLimited(told, headers=headers)

    def settle(self, amount: int, per_minute: int) -> None:
        """Charges more, whatever is left, or gives back what `charge` took for too much."""
        now_s = self._clock()
        used_s = max(0.0, self._full_at_s - now_s)
        self._full_at_s = now_s + max(0.0, used_s + amount * MINUTE_S / per_minute)


class LimitedKey(Key):
    """A key of the file and what it has used, which outlives a change of its limits."""

    def __init__(self, line: Line, clock: Callable[[], float]) -> None:
        self._running = 0
        self._requests, self._tokens = (
            _Minute("requests", clock),
            _Minute("tokens", clock),
        )
        self.take(line)

    def take(self, line: Line) -> None:
        super().__init__(line.name, is_admin=line.admin)
        self.line, self.min_priority = line, line.min_priority
        self.limits_tokens = line.tokens_per_minute is not None

    def begin(self) -> Mapping[str, str]:
        most, per_minute = self.line.max_concurrent, self.line.requests_per_minute
        if most is not None and self._running >= most:
            told = f"{self.name} may have {most} requests at a time: wait for one"
            raise RateLimited(told, headers={"retry-after": "1"})
        headers = (
            {}
            if per_minute is None
            else self._requests.charge(self.name, 1, per_minute)
        )
        self._running += 1
        return headers

    def charge(self, tokens: int) -> Mapping[str, str]:
        most = self.line.tokens_per_minute
        return {} if most is None else self._tokens.charge(self.name, tokens, most)

    def settle(self, tokens: int) -> None:
        most = self.line.tokens_per_minute
        if most is not None:
            self._tokens.settle(tokens, most)

    def end(self) -> None:
        self._running -= 1


class FileAccess(Access):
    """Access by the options' keys and the file's: as many states as keys.

    Raises:
        ValueError: what is wrong with the file, with the line and the fix.
    """

    def __init__(
        self,
        settings: ProxySettings,
        metrics: Metrics,
        open_paths: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(settings, metrics, {*OPEN_PATHS, *open_paths})
        self._file, self._clock = settings.api_keys_file, clock
        self._of_options = option_keys(settings)
        self._of_file: dict[bytes, LimitedKey] = {}
        self.set_keys(self._read())

    async def watch(self) -> None:
        await asyncio.gather(super().watch(), self.watch_file())

    async def watch_file(self, interval_s: float = LOOK_INTERVAL_S) -> None:
        """Takes over a file that changes; a wrong one changes nothing. Ends if there is none."""
        seen: object = None  # at first it is read once more: it may just have changed
        while self._file is not None:
            seen = await asyncio.to_thread(self._look, self._file, seen)
            await asyncio.sleep(interval_s)

    def _look(self, file: str, seen: object) -> object:
        stamp: object = None
        try:
            found = os.stat(file)
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp != seen:
                before = {hashed: key.line for hashed, key in self._of_file.items()}
                self.set_keys(self._read())
                if before != {
                    hashed: key.line for hashed, key in self._of_file.items()
                }:
                    logger.info("%d API keys are read anew", len(self._of_file))
        except (ValueError, OSError) as error:
            if stamp != seen:
                logger.error("the API keys stay as they were: %s", error)
        return stamp

    def _read(self) -> dict[bytes, Key]:
        if self._file is None:
            return self._of_options
        names = {key.name for key in self._of_options.values()}
        lines: dict[bytes, Line] = {}
        for where, line in _lines(self._file):
            hashed = (
                bytes.fromhex(line.sha256) if line.sha256 else digest(line.key or "")
            )
            if line.name in names or hashed in lines or hashed in self._of_options:
                whose = "the name" if line.name in names else "the key"
                raise ValueError(
                    f"{where}: {whose} of {line.name} is another's too: change it"
                )
            names.add(line.name)
            lines[hashed] = msgspec.structs.replace(line, key=None, sha256=None)
        old, self._of_file = self._of_file, {}
        for hashed, line in lines.items():
            key = self._of_file[hashed] = old.get(hashed) or LimitedKey(
                line, self._clock
            )
            key.take(line)
        return {**self._of_options, **self._of_file}


def _lines(path: str) -> Iterator[tuple[str, Line]]:
    """Each key with where it stands."""
    told = f"--api-keys-file {path}"
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"{told}: {error.strerror}; give a file that can be read"
        ) from None
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1)]
    lines = [(n, line) for n, line in lines if line and not line.startswith(b"#")]
    if not lines or len(text) > MAX_FILE_BYTES or len(lines) > MAX_KEYS:
        most = f"at most {MAX_KEYS} keys and {MAX_FILE_BYTES} bytes"
        raise ValueError(
            f"{told} has {len(lines)} keys, not one or more, {most}: {_FIX}"
        )
    for number, text in lines:
        where = f"{told} line {number}"
        try:
            line = msgspec.json.decode(text, type=Line)
        except (
            msgspec.MsgspecError,
            RecursionError,
        ) as error:  # without values: they are secret
            members = ", ".join(Line.__struct_fields__)
            raise ValueError(
                f"{where}: {error}; {_FIX} (members are {members})"
            ) from None
        if (line.key is None) == (line.sha256 is None):
            raise ValueError(
                f'{where}: give {line.name} a "key", or the "sha256" of one'
            )
        yield where, line
