"""Who may call a process, decided by a request's head alone. Without any key everybody may do all.

With keys only `open_paths` answer those who have none, ADMIN_PATHS answer admin keys alone, and
whoever answers asks `visit_of` what it may show. proxy/keys.py adds a file of keys with limits.
"""

import hashlib
import re
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, cast

from protocol.cache_salt import derive
from protocol.errors import Forbidden, Unauthorized
from protocol.http.cross_site import check_content_type, is_from_another_site
from protocol.http.tls import Certificate, trusted
from protocol.metrics import Metrics
from protocol.numbers import STATS_PATH
from protocol.process.logging import get_logger
from protocol.settings.machine import is_local
from protocol.settings.options import AccessOptions, ListenOptions

logger = get_logger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
ADMIN_PATHS = (
    "/metrics",
    STATS_PATH,
    "/ui/state",
    "/admin/",
    "/drain",
    "/migrate",
)  # begin so
BARE = {
    "details": "are for admin keys"
}  # of an answer that says no more than yes or no


def rate_headers(unit: str) -> list[str]:
    return [f"x-ratelimit-{name}-{unit}" for name in ("limit", "remaining", "reset")]


RATE_HEADERS = [*rate_headers("requests"), *rate_headers("tokens")]
SHARE_HEADER = b"x-baton-share"
_SHARE_CHARS = 16
NOBODY = "-"  # in metrics and logs, where there is no known key
_OUTCOMES = ("accepted", "limited", "forbidden")  # of a known key
_VISIT = "baton.visit"  # in ASGI's scope
_OF_OTHERS = {
    b"origin",
    b"forwarded",
    b"x-forwarded-for",
}  # headers that a page or a proxy adds
_ADDRESS = re.compile(
    rb"(localhost|[\d.]+|\[[^]]+\])(:\d*)?", re.IGNORECASE
)  # no site's name


def check(options: ListenOptions) -> None:
    """To be called at the start: warns of a server for everybody. Raises ValueError if a file of
    TLS cannot be used, or if an option needs API keys and there are none."""
    Certificate(options)
    trusted(options.tls_ca)
    may_have_keys = options.has_keys or getattr(options, "passes_keys_on", False)
    if options.cache_salt_by_key and not may_have_keys:
        raise ValueError(
            "--cache-salt-by-key has no effect without API keys: give --api-key, --admin-key or (a "
            "proxy) --api-keys-file, or leave it out"
        )
    if not (options.has_keys or options.insecure or is_local(options.host)):
        told = "ANYONE WHO REACHES %s MAY USE THIS SERVER: give it --api-key, or --insecure if its "
        logger.warning(told + "network is protection enough", options.host)


class Key:
    """A known key. Some have limits; `min_priority` is the most urgent that it may ask for."""

    min_priority: int | None = None
    limits_tokens = False

    def __init__(self, name: str, *, is_admin: bool) -> None:
        self.name, self.is_admin = name, is_admin

    def begin(self) -> Mapping[str, str]:
        """A request begins; returns headers of its answer. Raises RateLimited."""
        return {}

    def charge(self, tokens: int) -> Mapping[str, str]:
        """It takes so many, as far as one can tell; returns and raises as `begin`."""
        return {}

    def settle(self, tokens: int) -> None:
        """Its answer has ended: it took so many more than it was charged for, or fewer."""

    def end(self) -> None: ...


class Visit:
    """One request, which counts as its key's until the end of the `with`."""

    def __init__(self, key: Key | None, *, is_admin: bool) -> None:
        self.has_key, self.name = key is not None, key.name if key else NOBODY
        self.is_admin = is_admin
        self.min_priority = None if key is None else key.min_priority
        self.salting_key = (
            b""  # digest of the key, where keys salt caches; see cache_salt.py
        )
        self.begun: Key | None = None
        self.headers: Mapping[str, str] = {}  # of the answer
        self._num_charged = 0

    @property
    def counts_tokens(self) -> bool:
        """Whether the tokens of its answer are to be counted, see `settle`."""
        return self.begun is not None and self.begun.limits_tokens

    def cache_salt(self, cache_salt: str | None, secret: bytes) -> bytes:
        """The salt of a request that asks for `cache_salt`; see protocol/cache_salt.py."""
        return derive(cache_salt, self.salting_key, secret)

    def charge(self, tokens: int) -> None:
        """See Key."""
        if self.begun is not None:
            self.headers = {**self.headers, **self.begun.charge(tokens)}
            self._num_charged = tokens

    def settle(self, tokens: int) -> None:
        """The answer has ended and took so many tokens: the key is charged for these instead of
        what `charge` estimated."""
        if self.begun is not None and self._num_charged:
            self.begun.settle(tokens - self._num_charged)
            self._num_charged = tokens

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *_: object) -> None:
        if self.begun is not None:
            self.begun.end()


_EVERYBODY = Visit(None, is_admin=True)  # where there are no keys


def visit_of(scope: Mapping[str, Any]) -> Visit:
    return cast(Visit, scope.get(_VISIT, _EVERYBODY))


def share_header(visit: Visit) -> list[tuple[bytes, bytes]]:
    """The header by which a proxy tells servers whose request it is, without the key's name."""
    if not visit.has_key:
        return []
    return [(SHARE_HEADER, digest(visit.name).hex()[:_SHARE_CHARS].encode())]


def share_of(scope: Mapping[str, Any]) -> str:
    """Whose request this is, to share a server among keys: as the proxy sent it, or by the key of
    this process; empty where there are no keys."""
    given = dict(scope["headers"]).get(SHARE_HEADER, b"").decode("latin-1")
    visit = visit_of(scope)
    return given[:_SHARE_CHARS] or (visit.name if visit.has_key else "")


def check_operator(scope: Mapping[str, Any]) -> None:
    """Whoever has no key, where none is needed, must be on this machine, and neither another site's
    page in a browser, even one whose name leads here, nor behind a proxy that tells so. Raises
    Forbidden. A key that may not was refused before."""
    headers = dict(scope["headers"])
    is_direct = _OF_OTHERS.isdisjoint(headers) and not is_from_another_site(headers)
    is_ours = is_direct and is_local((scope.get("client") or ("",))[0])
    is_named = _ADDRESS.fullmatch(headers.get(b"host", b"localhost"))
    if not (visit_of(scope).has_key or (is_ours and is_named)):
        raise Forbidden(
            f"{scope['path']} is for clients at localhost, no browser, or --admin-key"
        )


def digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def option_keys(options: AccessOptions) -> dict[bytes, Key]:
    """By digest."""
    kinds = {"api-key": options.api_key, "admin-key": options.admin_key}
    return {
        digest(secret.get_secret_value()): Key(
            f"{kind}-{n}", is_admin=kind == "admin-key"
        )
        for kind, secrets in kinds.items()
        for n, secret in enumerate(secrets, 1)
    }


class Access:
    """The keys of a process, and what it serves HTTPS with. Raises ValueError as `check`."""

    def __init__(
        self,
        options: AccessOptions,
        metrics: Metrics,
        open_paths: Collection[str] = OPEN_PATHS,
    ) -> None:
        self._metrics, self._open_paths = metrics, open_paths
        self.certificate = Certificate(options)
        self._salts_by_key = options.cache_salt_by_key
        self._keys: Mapping[bytes, Key] = {}
        self.take(option_keys(options))
        if options.has_keys:
            metrics.begin("baton_key_requests", key=NOBODY, outcome="unknown")

    async def watch(self) -> None:
        """Keeps to files that change."""
        await self.certificate.keep_new()

    def take(self, keys: Mapping[bytes, Key]) -> None:
        """These instead of those before."""
        old, new = ({key.name for key in each.values()} for each in (self._keys, keys))
        for outcome in _OUTCOMES:
            for gone in old - new:
                self._metrics.end("baton_key_requests", key=gone, outcome=outcome)
            for name in new:
                self._metrics.begin("baton_key_requests", key=name, outcome=outcome)
        self._keys = keys

    def bare(self, scope: Mapping[str, Any]) -> dict[str, str] | None:
        """What to say instead of details to who is no admin."""
        return None if visit_of(scope).is_admin else BARE

    def admit(self, scope: MutableMapping[str, Any]) -> Visit:
        """The visit to enter, for a request of ASGI whose body nobody has read.

        Raises:
            Unauthorized, Forbidden, RateLimited: it is not to be served.
            UnsupportedMediaType: a page of another site sent it without asking first.
        """
        check_content_type(scope)
        if not (self._keys or self._salts_by_key):
            return _EVERYBODY
        path, given = scope["path"], _given(dict(scope["headers"]))
        if not self._keys:  # of a proxy that passes on the keys of its servers' clients
            visit = scope[_VISIT] = Visit(None, is_admin=True)
            visit.salting_key = digest(given) if given else b""
            return visit
        # By digest: how long a lookup takes tells of a hash that no caller can steer.
        key_digest = digest(given)
        key = self._keys.get(key_digest)
        visit = scope[_VISIT] = Visit(key, is_admin=key is not None and key.is_admin)
        if key is not None and self._salts_by_key:
            visit.salting_key = key_digest
        if path in self._open_paths:
            return visit
        outcome = "unknown"
        try:
            if key is None:
                told = "the API key is unknown" if given else "this needs an API key"
                told += ": send the header `Authorization: Bearer KEY`"
                raise Unauthorized(
                    told, headers={"www-authenticate": 'Bearer realm="baton"'}
                )
            outcome = "forbidden"
            if path.startswith(ADMIN_PATHS) and not key.is_admin:
                raise Forbidden(
                    f"{path[:80]} is for admin keys alone; {key.name} is none"
                )
            outcome = "limited"
            visit.headers, visit.begun = key.begin(), key
            outcome = "accepted"
        finally:
            self._metrics.inc("baton_key_requests", key=visit.name, outcome=outcome)
        return visit


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    """The key that a request brings, as OpenAI's clients or as Anthropic's send it."""
    scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return (bearer or headers.get(b"x-api-key", b"").strip())[:4096]
