"""The page's files, read once at the start, and its one source of data, GET /ui/state.

Nothing comes from other hosts and no script from data: the policy in HEADERS sees to that in every
browser. The files may be had by anyone; the data are for admins.
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
TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


def _files() -> dict[str, tuple[bytes, bytes]]:
    """Type and bytes by path."""
    found = {}
    for file in resources.files("proxy.ui").joinpath("assets").iterdir():
        if (suffix := file.name.rpartition(".")[2]) in TYPES:
            path = "/" if file.name == "index.html" else f"/ui/{file.name}"
            found[path] = (TYPES[suffix], file.read_bytes())
    return found


FILES = _files()
OPEN_PATHS = frozenset(FILES)
PATHS = OPEN_PATHS | {STATE_PATH}


def is_browser(scope: dict[str, Any]) -> bool:
    """Whether a person opened this path in a browser: programs ask for no HTML."""
    accepted = next(
        (value for name, value in scope["headers"] if name == b"accept"), b""
    )
    return scope["method"] in ("GET", "HEAD") and b"text/html" in accepted.lower()


class Site(State):
    """The state of one proxy, and the answers to GET and HEAD of `paths`: none unless `is_on`."""

    open_paths = OPEN_PATHS

    @property
    def paths(self) -> frozenset[str]:
        return PATHS if self.is_on else frozenset()

    def error_page(self, error: BatonError) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Headers and body that show an error to a person who has opened a path in a browser, with
        links to the paths that have something to show."""
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
        return [*HEADERS, (b"content-type", TYPES["html"])], page.encode()

    async def answer(self, scope: dict[str, Any], reply: Reply) -> None:
        """Raises InvalidRequest."""
        path = scope["path"]
        if path == STATE_PATH:
            asked = parse_qs(scope["query_string"].decode("latin-1"))
            since, epoch = (asked.get(name, [""])[0] for name in ("since", "epoch"))
            if since.strip("0123456789"):
                told = f"since is {short_repr(since)}: give the `number` of the answer before, or 0"
                raise InvalidRequest(told, param="since")
            kind, data = (
                b"application/json",
                await self.since(int(since[:18] or 0), epoch),
            )
        else:
            kind, data = FILES[path]
        await reply.answer(200, [*HEADERS, (b"content-type", kind)], data)
