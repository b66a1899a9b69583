"""Access control, which never reads the body of a request.

Without API keys every client has all rights, except the rights that `check_operator`
restricts. With API keys, a client without a key can use only the open paths of
`Access`. Other paths require a key, and an admin key if they begin with one of
ADMIN_PATHS. Handlers call `Access.redaction` to find out whether their response may
contain details. proxy/keys.py adds a file of keys with limits.
"""

import hashlib
import re
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, cast

from protocol.anthropic.errors import check_version
from protocol.cache_salt import derive
from protocol.errors import Forbidden, Unauthorized
from protocol.http.cross_site import check_content_type, is_from_another_site
from protocol.http.tls import Certificate, client_context
from protocol.metrics import Metrics
from protocol.process.logging import get_logger
from protocol.server_stats import STATS_PATH
from protocol.settings.machine import is_local
from protocol.settings.server_options import AccessOptions, ListenOptions

logger = get_logger(__name__)

METRICS_PATH = "/metrics"
OPEN_PATHS = frozenset({"/health", "/ready"})  # the default of `open_paths`
# Prefixes of the paths that require an admin key, unless a path is open.
ADMIN_PATHS = (METRICS_PATH, STATS_PATH, "/ui/state", "/admin/", "/drain", "/migrate")
# Replaces the details in a response to a client without the rights of an admin.
REDACTED = {"details": "are for admin keys"}


def rate_headers(unit: str) -> list[str]:
    """Returns the names of the headers about the rate limit of a unit, such as
    requests.
    """
    return [f"x-ratelimit-{name}-{unit}" for name in ("limit", "remaining", "reset")]


RATE_HEADERS = [*rate_headers("requests"), *rate_headers("tokens")]
SHARE_HEADER = b"x-baton-share"  # identifies the API key of a request; see share_of
_SHARE_CHARS = 16  # maximum length of the value of SHARE_HEADER
UNKNOWN_KEY = "-"  # name in metrics and logs for a request without a known key
# Values of the label `outcome` of baton_key_requests for requests with a known key.
_OUTCOMES = ("accepted", "limited", "forbidden")
_GRANT = "baton.grant"  # key of the AccessGrant in ASGI's scope
# Headers that a browser page or a proxy adds.
_INDIRECT_HEADERS = {b"origin", b"forwarded", b"x-forwarded-for"}
# A Host header with an address or localhost, not with a domain name.
_ADDRESS = re.compile(rb"(localhost|[\d.]+|\[[^]]+\])(:\d*)?", re.IGNORECASE)


def check(options: ListenOptions) -> None:
    """Checks the options when a process starts.

    Logs a warning if clients on other machines need no API key, unless --insecure is
    given.

    Raises:
        ValueError: A TLS file cannot be used, or an option needs API keys and there are
            none.
    """
    Certificate(options)
    client_context(options.tls_ca)
    may_have_keys = options.has_keys or getattr(options, "passes_keys_on", False)
    if options.cache_salt_by_key and not may_have_keys:
        raise ValueError(
            "--cache-salt-by-key has no effect without API keys: give --api-key, "
            "--admin-key or, to a proxy, --api-keys-file; or leave it out"
        )
    if not (options.has_keys or options.insecure or is_local(options.host)):
        logger.warning(
            "ANY CLIENT THAT REACHES %s MAY USE THIS SERVER: give it --api-key, or "
            "--insecure if the network is protected",
            options.host,
        )


class Key:
    """An API key that this process accepts. A subclass may have limits.

    Attributes:
        min_priority: The most urgent priority (the smallest number) that requests with
            this key may have; None: any priority.
        limits_tokens: Whether the key has a token limit, so that the tokens of its
            requests must be counted.
    """

    min_priority: int | None = None
    limits_tokens = False

    def __init__(self, name: str, *, is_admin: bool) -> None:
        self.name = name
        self.is_admin = is_admin

    def begin_request(self) -> Mapping[str, str]:
        """Counts a new request, and returns headers for its response.

        Raises:
            RateLimited: The key has reached one of its limits.
        """
        return {}

    def charge(self, tokens: int) -> Mapping[str, str]:
        """Charges an estimate of a request's tokens to the key, and returns headers for
        the response.

        Raises:
            RateLimited: Too little of the key's token limit is left.
        """
        return {}

    def settle(self, difference: int) -> None:
        """Corrects an earlier charge.

        Args:
            difference: The request's actual tokens minus the estimate; may be negative.
        """

    def end_request(self) -> None:
        """Counts the end of a request."""


class AccessGrant:
    """The rights of one request.

    A grant is a context manager. If the request has a `charged_key`, this key counts
    the request as active until the `with` block ends.
    """

    def __init__(self, key: Key | None, *, is_admin: bool) -> None:
        self.has_key = key is not None
        self.name = key.name if key else UNKNOWN_KEY
        self.is_admin = is_admin
        self.min_priority = None if key is None else key.min_priority
        # Digest of the key if caches are salted by key; see cache_salt.py.
        self.salting_key = b""
        # The key that this request is charged to; None if the request is not charged.
        self.charged_key: Key | None = None
        self.headers: Mapping[str, str] = {}  # for the response
        self._num_charged = 0

    @property
    def counts_tokens(self) -> bool:
        """Whether the tokens of the response must be counted, see `settle`."""
        return self.charged_key is not None and self.charged_key.limits_tokens

    def cache_salt(self, cache_salt: str | None, secret: bytes) -> bytes:
        """Returns the salt of this request; see protocol/cache_salt.py."""
        return derive(cache_salt, self.salting_key, secret)

    def charge(self, tokens: int) -> None:
        """Charges an estimate of the tokens to the key, and updates `headers`.

        Raises:
            RateLimited: Too little of the key's token limit is left.
        """
        if self.charged_key is not None:
            self.headers = {**self.headers, **self.charged_key.charge(tokens)}
            self._num_charged = tokens

    def settle(self, tokens: int) -> None:
        """Corrects the charge: the actual number of tokens replaces the estimate."""
        if self.charged_key is not None and self._num_charged:
            self.charged_key.settle(tokens - self._num_charged)
            self._num_charged = tokens

    def __enter__(self) -> "AccessGrant":
        return self

    def __exit__(self, *_: object) -> None:
        if self.charged_key is not None:
            self.charged_key.end_request()


# For all requests if there are neither API keys nor cache salts by key.
_FULL_ACCESS = AccessGrant(None, is_admin=True)


def grant_of(scope: Mapping[str, Any]) -> AccessGrant:
    """Returns the grant of a request that `Access.admit` has admitted."""
    return cast(AccessGrant, scope.get(_GRANT, _FULL_ACCESS))


def share_header(grant: AccessGrant) -> list[tuple[bytes, bytes]]:
    """Returns SHARE_HEADER with a digest of the key's name as its value.

    The list is empty for a request without a key.
    """
    if not grant.has_key:
        return []
    return [(SHARE_HEADER, digest(grant.name).hex()[:_SHARE_CHARS].encode())]


def share_of(scope: Mapping[str, Any]) -> str:
    """Returns an identifier of the request's key.

    An engine shares its capacity equally among the identifiers of waiting requests. The
    identifier is the value of SHARE_HEADER, which a proxy sends. Without this header,
    it is the name of the key, or empty if the request has no key.
    """
    header = dict(scope["headers"]).get(SHARE_HEADER, b"").decode("latin-1")
    grant = grant_of(scope)
    return header[:_SHARE_CHARS] or (grant.name if grant.has_key else "")


def check_operator(scope: Mapping[str, Any]) -> None:
    """Raises Forbidden unless the client may operate this process.

    With API keys, `Access.admit` has already checked the client's key for this path.
    Without API keys, the client must be on this machine, and no proxy may have added
    headers to the request. The request must not come from a browser page of another
    site, even if the name of that site resolves to this machine.
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
            f"{scope['path']} needs an admin key (--admin-key), or a client on "
            "localhost that is not a browser"
        )


def digest(key: str | bytes) -> bytes:
    """Returns the SHA-256 digest of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def option_keys(options: AccessOptions) -> dict[bytes, Key]:
    """Returns the keys of --api-key and --admin-key by their digests."""
    kinds = {"api-key": options.api_key, "admin-key": options.admin_key}
    keys: dict[bytes, Key] = {}
    for kind, secrets in kinds.items():
        for number, secret in enumerate(secrets, 1):
            key = Key(f"{kind}-{number}", is_admin=kind == "admin-key")
            keys[digest(secret.get_secret_value())] = key
    return keys


class Access:
    """The API keys and the TLS certificate of a process.

    Args:
        metrics: Counts the requests of each key.
        open_paths: Paths that clients without a key can use. --public-metrics adds
            METRICS_PATH.

    Raises:
        ValueError: A TLS file cannot be used.
    """

    def __init__(
        self,
        options: ListenOptions,
        metrics: Metrics,
        open_paths: Collection[str] = OPEN_PATHS,
    ) -> None:
        self._metrics = metrics
        self._open_paths = {*open_paths}
        if options.public_metrics:
            self._open_paths.add(METRICS_PATH)
        self.certificate = Certificate(options)
        self._salts_by_key = options.cache_salt_by_key
        self._keys: Mapping[bytes, Key] = {}
        self.set_keys(option_keys(options))
        if options.has_keys:
            metrics.expose_series(
                "baton_key_requests", key=UNKNOWN_KEY, outcome="unknown"
            )

    async def watch(self) -> None:
        """Reloads the TLS files periodically, until the task is canceled.

        The method returns immediately if there are no TLS files. A subclass may also
        watch a file of API keys.
        """
        await self.certificate.keep_reloading()

    def set_keys(self, keys: Mapping[bytes, Key]) -> None:
        """Replaces the keys, and exposes the metrics of the new keys only."""
        old_names = {key.name for key in self._keys.values()}
        new_names = {key.name for key in keys.values()}
        for outcome in _OUTCOMES:
            for name in old_names - new_names:
                self._metrics.remove_series(
                    "baton_key_requests", key=name, outcome=outcome
                )
            for name in new_names:
                self._metrics.expose_series(
                    "baton_key_requests", key=name, outcome=outcome
                )
        self._keys = keys

    def redaction(self, scope: Mapping[str, Any]) -> dict[str, str] | None:
        """Returns the object that replaces details in the response.

        The result is None if the client has the rights of an admin, so that it receives
        the details.
        """
        return None if grant_of(scope).is_admin else REDACTED

    def admit(self, scope: MutableMapping[str, Any]) -> AccessGrant:
        """Checks an ASGI request, and returns its grant.

        If there are keys, requests for paths that are not open are counted. `grant_of`
        returns the same grant. The caller must serve the request in a `with` block of
        the grant.

        Raises:
            Unauthorized, Forbidden, RateLimited: The request must not be served.
            UnsupportedMediaType: A browser page of another site sent the request
                without a preflight request.
            InvalidRequest: The version of Anthropic's API in the request is invalid.
        """
        check_content_type(scope)
        check_version(scope)
        if not (self._keys or self._salts_by_key):
            return _FULL_ACCESS
        path = scope["path"]
        presented_key = _presented_key(dict(scope["headers"]))
        if not self._keys:  # a proxy that passes on the keys of its clients
            grant = scope[_GRANT] = AccessGrant(None, is_admin=True)
            grant.salting_key = digest(presented_key) if presented_key else b""
            return grant
        # Keys are looked up by digest, so the duration of the lookup reveals nothing
        # about a key.
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
                problem = "the request needs an API key"
                if presented_key:
                    problem = "the API key is unknown"
                raise Unauthorized(
                    f"{problem}: send the header `Authorization: Bearer KEY` or "
                    "`x-api-key: KEY`",
                    headers={"www-authenticate": 'Bearer realm="baton"'},
                )
            outcome = "forbidden"
            if path.startswith(ADMIN_PATHS) and not key.is_admin:
                raise Forbidden(
                    f"{path[:80]} needs an admin key, but {key.name} is not one"
                )
            outcome = "limited"
            grant.headers = key.begin_request()
            grant.charged_key = key
            outcome = "accepted"
        finally:
            self._metrics.inc("baton_key_requests", key=grant.name, outcome=outcome)
        return grant


def _presented_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Returns the key in the headers of OpenAI's or of Anthropic's clients, or b""."""
    scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return (bearer or headers.get(b"x-api-key", b"").strip())[:4096]
