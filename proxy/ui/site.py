"""Serves the proxy's web page: its files, and its data (GET /ui/state).

The files are read once, when the program starts. The policy in HEADERS keeps browsers
from loading anything from other hosts, and from running scripts that the data contain.
The files are public. If the proxy requires API keys, the data require an admin key.
"""

from html import escape
from importlib import resources
from typing import Any
from urllib.parse import parse_qs

from protocol.errors import BatonError, InvalidRequest
from protocol.short_repr import short_repr
from proxy.relay import Reply
from proxy.ui.state import State

STATE_PATH = "/ui/state"
CONTENT_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


def _load_files() -> dict[str, tuple[bytes, bytes]]:
    """Return the content type and the bytes of each file, by the path of its URL."""
    files = {}
    folder = resources.files("proxy.ui").joinpath("assets")
    for file in (*folder.iterdir(), *folder.joinpath("vendor").iterdir()):
        suffix = file.name.rpartition(".")[2]
        if suffix in CONTENT_TYPES:
            path = "/" if file.name == "index.html" else f"/ui/{file.name}"
            files[path] = (CONTENT_TYPES[suffix], file.read_bytes())
    return files


FILES = _load_files()
OPEN_PATHS = frozenset(FILES)
PATHS = OPEN_PATHS | {STATE_PATH}


def is_browser(scope: dict[str, Any]) -> bool:
    """Return whether a browser sent the request: `Accept` contains text/html."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    for name, value in scope["headers"]:
        if name == b"accept":
            return b"text/html" in value.lower()
    return False


class Site(State):
    """Serves the page of one proxy: answers GET and HEAD requests for `paths`.

    Attributes:
        open_paths: paths that need no API key.
    """

    open_paths = OPEN_PATHS

    @property
    def paths(self) -> frozenset[str]:
        """The paths that this site serves; none if the page is switched off."""
        return PATHS if self.is_on else frozenset()

    def error_page(self, error: BatonError) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return headers and body of a page that shows an error in a browser.

        The page also links to the paths that are useful in a browser.
        """
        links = [
            ("/v1/models", "the models that are served"),
            ("/docs", "all paths of the API"),
        ]
        if self.is_on:
            links.insert(0, ("/", "the page of this cluster, with a chat"))
        items = "".join(
            f'<li><a href="{path}">{path}</a>: {text}</li>' for path, text in links
        )
        page = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>Baton</title>'
            '<link rel="stylesheet" href="/ui/page.css">'
            f"<main><section><h1>{error.status}</h1><p>{escape(error.message)}</p>"
            f"<ul>{items}</ul></section></main></html>"
        )
        return [*HEADERS, (b"content-type", CONTENT_TYPES["html"])], page.encode()

    async def answer(self, scope: dict[str, Any], reply: Reply) -> None:
        """Answer a request for one of `paths`.

        Raises:
            InvalidRequest: `since` is not a number.
        """
        path = scope["path"]
        if path == STATE_PATH:
            content_type = b"application/json"
            data = await self._state(scope["query_string"].decode("latin-1"))
        else:
            content_type, data = FILES[path]
        headers = [*HEADERS, (b"content-type", content_type)]
        await reply.answer(200, headers, data)

    async def _state(self, query_string: str) -> bytes:
        query = parse_qs(query_string)
        since = query.get("since", [""])[0]
        epoch = query.get("epoch", [""])[0]
        if since.strip("0123456789"):
            raise InvalidRequest(
                f"since is {short_repr(since)}: give the `number` of the last answer, "
                "or 0",
                param="since",
            )
        return await self.since(int(since[:18] or 0), epoch)
