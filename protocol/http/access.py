"""Access control by the head of a request. Without API keys every client has all
rights.

With keys, only `open_paths` answer clients without a key, and ADMIN_PATHS answer only
admin keys. The handler of a path calls `grant_of` to learn what it may reveal.
proxy/keys.py adds a file of keys with limits.
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
from protocol.process.logging import get_logger
from protocol.server_stats import STATS_PATH
from protocol.settings.machine import is_local
from protocol.settings.server_options import AccessOptions, ListenOptions

logger = get_logger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
# Prefixes of the paths that require an admin key.
ADMIN_PATHS = ("/metrics", STATS_PATH, "/ui/state", "/admin/", "/drain", "/migrate")
# Takes the place of details in a response to a client without an admin key.
REDACTED = {"details": "are for admin keys"}


def rate_headers(unit: str) -> list[str]:
    """Returns the names of the headers about the rate limit of `unit`."""
    return [f"x-ratelimit-{name}-{unit}" for name in ("limit", "remaining", "reset")]


RATE_HEADERS = [*rate_headers("requests"), *rate_headers("tokens")]
SHARE_HEADER = b"x-baton-share"
_SHARE_CHARS = 16
UNKNOWN_KEY = "-"  # name in metrics and logs where there is no known key
_OUTCOMES = ("accepted", "limited", "forbidden")  # of a known key
_GRANT = "baton.grant"  # key in ASGI's scope
# Headers that a browser page or a proxy adds.
_INDIRECT_HEADERS = {b"origin", b"forwarded", b"x-forwarded-for"}
# A Host header with an address or localhost, not with a domain name.
_ADDRESS = re.compile(rb"(localhost|[\d.]+|\[[^]]+\])(:\d*)?", re.IGNORECASE)


def check(options: ListenOptions) -> None:
    """Checks the options at the start; warns if every client may use the server.

    Raises:
        ValueError: A TLS file cannot be used, or an option needs API keys and there are
            none.
    """
    Certificate(options)
    trusted(options.tls_ca)
    may_have_keys = options.has_keys or getattr(options, "passes_keys_on", False)
    if options.cache_salt_by_key and not may_have_keys:
        raise ValueError(
            "--cache-salt-by-key has no effect without API keys: give --api-key, "
            "--admin-key or (a proxy) --api-keys-file, or leave it out"
        )
    if not (options.has_keys or options.insecure or is_local(options.host)):
        logger.warning(
            "ANY CLIENT THAT REACHES %s MAY USE THIS SERVER: give it --api-key, or "
            "--insecure if the network is protected",
            options.host,
        )


class Key:
    """An API key that the process knows. Subclasses may have limits.

    Attributes:
        min_priority: The most urgent priority that its requests may have.
        limits_tokens: Whether the tokens of its requests must be counted.
    """

    min_priority: int | None = None
    limits_tokens = False

    def __init__(self, name: str, *, is_admin: bool) -> None:
        self.name = name
        self.is_admin = is_admin

    def begin(self) -> Mapping[str, str]:
        """Counts a new request. Returns headers of its response. Raises RateLimited."""
        return {}

    def charge(self, tokens: int) -> Mapping[str, str]:
        """Charges an estimate of the tokens. Returns and raises the same as `begin`."""
        return {}

    def settle(self, tokens: int) -> None:
        """Corrects the charge by `tokens`, which may be negative, after the
        response.
        """

    def end(self) -> None:
        """Counts the end of a request."""


class AccessGrant:
    """The rights of one request. Its key counts the request until the `with` ends."""

    def __init__(self, key: Key | None, *, is_admin: bool) -> None:
        self.has_key = key is not None
        self.name = key.name if key else UNKNOWN_KEY
        self.is_admin = is_admin
        self.min_priority = None if key is None else key.min_priority
        # Digest of the key if caches are salted by key; see cache_salt.py.
        self.salting_key = b""
        self.charged_key: Key | None = None  # the key that counts this request
        self.headers: Mapping[str, str] = {}  # of the response
        self._num_charged = 0

    @property
    def counts_tokens(self) -> bool:
        """Whether the tokens of the response must be counted, see `settle`."""
        return self.charged_key is not None and self.charged_key.limits_tokens

    def cache_salt(self, cache_salt: str | None, secret: bytes) -> bytes:
        """Returns the salt of this request; see protocol/cache_salt.py."""
        return derive(cache_salt, self.salting_key, secret)

    def charge(self, tokens: int) -> None:
        """Charges an estimate of the tokens to the key. Raises RateLimited."""
        if self.charged_key is not None:
            self.headers = {**self.headers, **self.charged_key.charge(tokens)}
            self._num_charged = tokens

    def settle(self, tokens: int) -> None:
        """Charges the actual number of tokens of the response instead of the
        estimate.
        """
        if self.charged_key is not None and self._num_charged:
            self.charged_key.settle(tokens - self._num_charged)
            self._num_charged = tokens

    def __enter__(self) -> "AccessGrant":
        return self

    def __exit__(self, *_: object) -> None:
        if self.charged_key is not None:
            self.charged_key.end()


_FULL_ACCESS = AccessGrant(None, is_admin=True)  # of every request without any keys


def grant_of(scope: Mapping[str, Any]) -> AccessGrant:
    """Returns the grant of a request that `Access.admit` has admitted."""
    return cast(AccessGrant, scope.get(_GRANT, _FULL_ACCESS))


def share_header(grant: AccessGrant) -> list[tuple[bytes, bytes]]:
    """Returns the header that identifies the key to servers, without the key's name."""
    if not grant.has_key:
        return []
    return [(SHARE_HEADER, digest(grant.name).hex()[:_SHARE_CHARS].encode())]


def share_of(scope: Mapping[str, Any]) -> str:
    """Returns an identifier of the key, by which keys share a server equally.

    It is what the proxy has sent, else the name of the key. It is empty if there are no
    keys.
    """
    header = dict(scope["headers"]).get(SHARE_HEADER, b"").decode("latin-1")
    grant = grant_of(scope)
    return header[:_SHARE_CHARS] or (grant.name if grant.has_key else "")


def check_operator(scope: Mapping[str, Any]) -> None:
    """Raises Forbidden unless the client may operate this process.

    A client with a key may, as `Access.admit` has checked the key. Without keys, the
    client must be on this machine. It must not be a browser page of another site, even
    if the site's name resolves to this machine. It must not be behind a proxy that adds
    headers.
    """
    if grant_of(scope).has_key:
        return
    headers = dict(scope["headers"])
    client_host = (scope.get("client") or ("",))[0]
    is_local_client = (
        _INDIRECT_HEADERS.isdisjoint(headers)
        and not is_from_another_site(headers)
        and is_local(client_host)
    )
    has_address = _ADDRESS.fullmatch(headers.get(b"host", b"localhost"))
    if not (is_local_client and has_address):
        raise Forbidden(
            f"{scope['path']} is for --admin-key, or for clients at localhost that are "
            "no browser"
        )


def digest(key: str | bytes) -> bytes:
    """Returns the SHA-256 digest of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def option_keys(options: AccessOptions) -> dict[bytes, Key]:
    """Returns the keys of --api-key and --admin-key by digest."""
    kinds = {"api-key": options.api_key, "admin-key": options.admin_key}
    keys: dict[bytes, Key] = {}
    for kind, secrets in kinds.items():
        for number, secret in enumerate(secrets, 1):
            key = Key(f"{kind}-{number}", is_admin=kind == "admin-key")
            keys[digest(secret.get_secret_value())] = key
    return keys


class Access:
    """The API keys and the TLS certificate of a process. Raises ValueError like
    `check`.
    """

    def __init__(
        self,
        options: AccessOptions,
        metrics: Metrics,
        open_paths: Collection[str] = OPEN_PATHS,
    ) -> None:
        self._metrics = metrics
        self._open_paths = open_paths
        self.certificate = Certificate(options)
        self._salts_by_key = options.cache_salt_by_key
        self._keys: Mapping[bytes, Key] = {}
        self.take(option_keys(options))
        if options.has_keys:
            metrics.begin("baton_key_requests", key=UNKNOWN_KEY, outcome="unknown")

    async def watch(self) -> None:
        """Reads files again when they change. It runs until it is cancelled."""
        await self.certificate.keep_new()

    def take(self, keys: Mapping[bytes, Key]) -> None:
        """Replaces the keys."""
        old_names = {key.name for key in self._keys.values()}
        new_names = {key.name for key in keys.values()}
        for outcome in _OUTCOMES:
            for name in old_names - new_names:
                self._metrics.end("baton_key_requests", key=name, outcome=outcome)
            for name in new_names:
                self._metrics.begin("baton_key_requests", key=name, outcome=outcome)
        self._keys = keys

    def redaction(self, scope: Mapping[str, Any]) -> dict[str, str] | None:
        """Returns what takes the place of details; None if the client is an admin."""
        return None if grant_of(scope).is_admin else REDACTED

    def admit(self, scope: MutableMapping[str, Any]) -> AccessGrant:
        """Returns the grant of an ASGI request. The caller enters it as a context.

        Raises:
            Unauthorized, Forbidden, RateLimited: The request must not be served.
            UnsupportedMediaType: A browser page of another site sent the request
                without a preflight request.
        """
        check_content_type(scope)
        if not (self._keys or self._salts_by_key):
            return _FULL_ACCESS
        path = scope["path"]
        presented_key = _presented_key(dict(scope["headers"]))
        if not self._keys:  # a proxy that passes on the keys of its clients
            grant = scope[_GRANT] = AccessGrant(None, is_admin=True)
            grant.salting_key = digest(presented_key) if presented_key else b""
            return grant
        # A lookup by digest: its duration depends on a hash that no client can steer.
        key_digest = digest(presented_key)
        key = self._keys.get(key_digest)
        is_admin = key is not None and key.is_admin
        grant = scope[_GRANT] = AccessGrant(key, is_admin=is_admin)
        if key is not None and self._salts_by_key:
            grant.salting_key = key_digest
        if path in self._open_paths:
            return grant
        outcome = "unknown"
        try:
            if key is None:
                problem = "this needs an API key"
                if presented_key:
                    problem = "the API key is unknown"
                raise Unauthorized(
                    f"{problem}: send the header `Authorization: Bearer KEY`",
                    headers={"www-authenticate": 'Bearer realm="baton"'},
                )
            outcome = "forbidden"
            if path.startswith(ADMIN_PATHS) and not key.is_admin:
                raise Forbidden(
                    f"{path[:80]} is for admin keys only, and {key.name} is not one"
                )
            outcome = "limited"
            grant.headers = key.begin()
            grant.charged_key = key
            outcome = "accepted"
        finally:
            self._metrics.inc("baton_key_requests", key=grant.name, outcome=outcome)
        return grant


def _presented_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Returns the key in the headers, as clients of OpenAI or Anthropic send it."""
    scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return (bearer or headers.get(b"x-api-key", b"").strip())[:4096]
