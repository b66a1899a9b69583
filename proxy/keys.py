"""The proxy's API keys: keys from options, and keys from a file, which may have limits.

Each line of the file is a JSON object. Empty lines and lines that begin with # are
skipped.
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

CHECK_INTERVAL_S = 2.0  # pause between two checks for a change of the file
MAX_KEYS = 10_000
MAX_FILE_BYTES = 1 << 23
MINUTE_S = 60.0
_FIX = 'write one JSON object per line, {"name": "me", "key": "..."}'


class KeyLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key as it is written in the file. A limit that is None does not apply.

    Attributes:
        key: the key itself. The proxy stores only its digest.
        sha256: the digest of the key, given instead of `key`.
    """

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.@-]{1,64}\Z")]
    key: Annotated[str, Meta(min_length=8, max_length=1024)] | None = None
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-fA-F]{64}\Z")] | None = None
    requests_per_minute: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    tokens_per_minute: Annotated[int, Meta(ge=1, le=10**12)] | None = None
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    min_priority: int | None = None
    admin: bool = False


class _Allowance:
    """A rate limit of one API key, in units such as tokens per minute, and its use.

    A key may use the full amount of a minute at once. A request that needs more than
    the full amount is admitted if nothing is in use; later requests then wait longer.
    The only state is the time at which the full amount is available again. Each use
    moves this time into the future.
    """

    def __init__(self, unit: str, clock: Callable[[], float]) -> None:
        self._unit = unit
        self._clock = clock
        self._full_at_s = 0.0  # when the full amount may be used again

    def charge(self, name: str, amount: int, per_minute: int) -> dict[str, str]:
        """Charge `amount` units; return the headers that report the limit.

        Raises:
            RateLimited: too little is left.
        """
        now_s = self._clock()
        seconds_per_unit = MINUTE_S / per_minute
        used_s = max(0.0, self._full_at_s - now_s)
        needed_s = amount * seconds_per_unit
        wait_s = used_s + min(needed_s, MINUTE_S) - MINUTE_S
        is_admitted = wait_s < 1e-6
        if is_admitted:
            used_s += needed_s
            self._full_at_s = now_s + used_s
        remaining = math.floor(max(0.0, MINUTE_S - used_s) / seconds_per_unit + 1e-6)
        values = (f"{per_minute}", f"{remaining}", f"{used_s:.3f}s")
        headers = dict(zip(rate_headers(self._unit), values, strict=True))
        if is_admitted:
            return headers
        headers["retry-after"] = f"{math.ceil(wait_s)}"
        raise RateLimited(
            f"{name} is limited to {per_minute} {self._unit} a minute: "
            f"wait for {wait_s:.3f} s",
            headers=headers,
        )

    def settle(self, amount: int, per_minute: int) -> None:
        """Correct an earlier charge by `amount`, which may be negative."""
        now_s = self._clock()
        used_s = max(0.0, self._full_at_s - now_s)
        self._full_at_s = now_s + max(0.0, used_s + amount * MINUTE_S / per_minute)


class LimitedKey(Key):
    """A key of the file and its usage. A change of the limits keeps the usage."""

    def __init__(self, line: KeyLine, clock: Callable[[], float]) -> None:
        self._num_running = 0
        self._requests = _Allowance("requests", clock)
        self._tokens = _Allowance("tokens", clock)
        self.update(line)

    def update(self, line: KeyLine) -> None:
        """Apply the limits of a line of the file."""
        super().__init__(line.name, is_admin=line.admin)
        self.line = line
        self.min_priority = line.min_priority
        self.limits_tokens = line.tokens_per_minute is not None

    def begin_request(self) -> Mapping[str, str]:
        max_concurrent = self.line.max_concurrent
        if max_concurrent is not None and self._num_running >= max_concurrent:
            raise RateLimited(
                f"{self.name} may have {max_concurrent} requests at a time: "
                "wait for one to finish",
                headers={"retry-after": "1"},
            )
        headers: Mapping[str, str] = {}
        if self.line.requests_per_minute is not None:
            headers = self._requests.charge(self.name, 1, self.line.requests_per_minute)
        self._num_running += 1
        return headers

    def charge(self, tokens: int) -> Mapping[str, str]:
        per_minute = self.line.tokens_per_minute
        if per_minute is None:
            return {}
        return self._tokens.charge(self.name, tokens, per_minute)

    def settle(self, difference: int) -> None:
        per_minute = self.line.tokens_per_minute
        if per_minute is not None:
            self._tokens.settle(difference, per_minute)

    def end_request(self) -> None:
        self._num_running -= 1


class FileAccess(Access):
    """Checks requests against the keys from the options and from the file.

    Raises:
        ValueError: the file is invalid; the message names the line and the fix.
    """

    def __init__(
        self,
        settings: ProxySettings,
        metrics: Metrics,
        open_paths: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(settings, metrics, {*OPEN_PATHS, *open_paths})
        self._file = settings.api_keys_file
        self._clock = clock
        self._option_keys = option_keys(settings)
        self._file_keys: dict[bytes, LimitedKey] = {}  # by digest
        self.set_keys(self._read())

    async def watch(self) -> None:
        await asyncio.gather(super().watch(), self.watch_file())

    async def watch_file(self, interval_s: float = CHECK_INTERVAL_S) -> None:
        """Reload the file whenever it changes; an invalid file changes no key.

        Returns at once if there is no file.
        """
        # The first check reads the file again, because the file may have changed since
        # the proxy started.
        stamp: object = None
        while self._file is not None:
            stamp = await asyncio.to_thread(self._check, self._file, stamp)
            await asyncio.sleep(interval_s)

    def _check(self, file: str, last_stamp: object) -> object:
        """Reload the file if its stamp has changed; return the new stamp."""
        stamp: object = None
        try:
            status = os.stat(file)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != last_stamp:
                before = self._file_lines()
                self.set_keys(self._read())
                if before != self._file_lines():
                    logger.info("reloaded %d API keys", len(self._file_keys))
        except (ValueError, OSError) as error:
            if stamp != last_stamp:
                logger.error("the API keys stay as they were: %s", error)
        return stamp

    def _file_lines(self) -> dict[bytes, KeyLine]:
        return {key_digest: key.line for key_digest, key in self._file_keys.items()}

    def _read(self) -> dict[bytes, Key]:
        """Read the file into `_file_keys`; return all keys by digest.

        A key that stays in the file keeps its counted usage.

        Raises:
            ValueError: the file is invalid.
        """
        if self._file is None:
            return self._option_keys
        names = {key.name for key in self._option_keys.values()}
        lines: dict[bytes, KeyLine] = {}
        for location, line in _read_lines(self._file):
            key_digest = digest(line.key or "")
            if line.sha256:
                key_digest = bytes.fromhex(line.sha256)
            duplicate = ""
            if line.name in names:
                duplicate = "the name"
            elif key_digest in lines or key_digest in self._option_keys:
                duplicate = "the key"
            if duplicate:
                raise ValueError(
                    f"{location}: {duplicate} of {line.name} is used twice: change it"
                )
            names.add(line.name)
            lines[key_digest] = msgspec.structs.replace(line, key=None, sha256=None)
        old_keys = self._file_keys
        self._file_keys = {}
        for key_digest, line in lines.items():
            key = old_keys.get(key_digest) or LimitedKey(line, self._clock)
            key.update(line)
            self._file_keys[key_digest] = key
        return {**self._option_keys, **self._file_keys}


def _read_lines(path: str) -> Iterator[tuple[str, KeyLine]]:
    """Yield each key with its location. Raises ValueError if the file is invalid."""
    option = f"--api-keys-file {path}"
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"{option}: {error.strerror}; give a file that can be read"
        ) from None
    lines = []
    for number, text_line in enumerate(text.splitlines(), 1):
        stripped = text_line.strip()
        if stripped and not stripped.startswith(b"#"):
            lines.append((number, stripped))
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(
            f"{option} has more than {MAX_FILE_BYTES} bytes, which is the limit; "
            "remove keys"
        )
    if not lines or len(lines) > MAX_KEYS:
        raise ValueError(
            f"{option} has {len(lines)} keys; it must have at least one, and at most "
            f"{MAX_KEYS}: {_FIX}"
        )
    for number, json_text in lines:
        location = f"{option} line {number}"
        try:
            line = msgspec.json.decode(json_text, type=KeyLine)
        except (msgspec.MsgspecError, RecursionError) as error:
            # The message quotes no values of the line, because keys are secret.
            members = ", ".join(KeyLine.__struct_fields__)
            raise ValueError(
                f"{location}: {error}; {_FIX} (members are {members})"
            ) from None
        if (line.key is None) == (line.sha256 is None):
            raise ValueError(
                f'{location}: give {line.name} a "key", or the "sha256" of a key'
            )
        yield location, line
