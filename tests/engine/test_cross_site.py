"""Web pages of other sites cannot use a proxy's or a server's compute."""

import json
from typing import Any

import httpx
import pytest

from tests.engine.test_access import ALICE, KEY_OPTIONS, SIDES, open_client
from tests.proxy.fakes import Fake, Rig, answers, decodes
from tests.rigs.http_server import serving

BODY = json.dumps({"model": "m", "prompt": "ab"})
OTHER_SITE: list[dict[str, str]] = [
    {"sec-fetch-site": "cross-site", "origin": "http://evil.example"},
    {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:1"},  # another port
    {"sec-fetch-site": "none", "origin": "chrome-extension://abc"},
    {"sec-fetch-site": "cross-site"},
    {"origin": "http://evil.example"},  # a browser without Sec-Fetch-Site
    {"origin": "null"},
    {"origin": "http://127.0.0.1:1"},
]
# Content types that a page may send without a CORS preflight, and no content type.
SIMPLE_TYPES: list[dict[str, str]] = [
    {"content-type": "text/plain"},
    {"content-type": "text/plain;charset=UTF-8"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "multipart/form-data; boundary=application/json"},
    {"content-type": "text/plain; application/json"},
    {},
]
JSON_TYPES: list[dict[str, str]] = [
    {"content-type": "application/json"},
    {"content-type": "Application/JSON; charset=utf-8"},
]
POSTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/release_kv",
    "/register",
    "/no/such/path",
)


async def post(
    client: httpx.AsyncClient, headers: dict[str, str], path: str = "/v1/completions"
) -> httpx.Response:
    return await client.post(path, content=BODY, headers=headers)


@SIDES
async def test_page_of_another_site_is_refused_without_application_json(
    side, tokenizer
):
    async with open_client(side, tokenizer) as client:
        for page in OTHER_SITE:
            for content_type in SIMPLE_TYPES:
                answer = await post(client, {**page, **content_type})
                error = answer.json()["error"]
                assert answer.status_code == 415, (page, content_type, answer.text)
                assert (
                    error["code"] == "unsupported_media_type" and not error["retryable"]
                )
                assert "application/json" in error["message"]
                assert error["message"].count("the header Content-Type") == 1
            for content_type in JSON_TYPES:
                assert (
                    await post(client, {**page, **content_type})
                ).status_code == 200, (page, content_type)


@SIDES
async def test_no_endpoint_accepts_a_body_of_a_simple_request(side, tokenizer):
    page = {"sec-fetch-site": "cross-site", "content-type": "text/plain"}
    async with open_client(side, tokenizer) as client:
        for path in POSTS:
            assert (await post(client, page, path)).status_code == 415, path


@pytest.mark.parametrize("signal", ["sec-fetch-site", "origin", "both", "default port"])
@SIDES
async def test_page_of_the_same_origin_is_served(side, signal, tokenizer):
    async with open_client(side, tokenizer) as client:
        url = client.base_url
        origin = {"origin": f"http://{url.host}:{url.port}"}
        headers = {
            "sec-fetch-site": {"sec-fetch-site": "same-origin"},
            "origin": origin,
            "both": {"sec-fetch-site": "same-origin", **origin},
            "default port": {
                "origin": "https://Baton.example",
                "host": "baton.example:443",
            },
        }[signal]
        for content_type in (*JSON_TYPES, *SIMPLE_TYPES):
            assert (
                await post(client, {**headers, **content_type})
            ).status_code == 200, content_type


@SIDES
async def test_client_without_browser_headers_needs_no_content_type(side, tokenizer):
    async with open_client(side, tokenizer) as client:
        for content_type in (
            *JSON_TYPES,
            *SIMPLE_TYPES,
        ):  # curl -d sends the content type of a form
            assert (await post(client, content_type)).status_code == 200, content_type


@SIDES
async def test_key_changes_nothing_for_a_page_of_another_site(side, tokenizer):
    async with open_client(side, tokenizer, **KEY_OPTIONS) as client:
        page = {**OTHER_SITE[0], "content-type": "text/plain", "x-api-key": ALICE}
        assert (await post(client, page)).status_code == 415


@SIDES
async def test_only_named_origins_pass_the_preflight(side, tokenizer):
    preflight = {"access-control-request-method": "POST"}
    preflight["access-control-request-headers"] = "content-type"
    options: dict[str, Any] = {"cors_origin": ("http://page:1",)}
    async with open_client(side, tokenizer, **options) as client:
        path = "/v1/completions"
        allowed = await client.options(
            path, headers={"origin": "http://page:1", **preflight}
        )
        assert allowed.headers["access-control-allow-origin"] == "http://page:1"
        other = await client.options(
            path, headers={"origin": "http://page:2", **preflight}
        )
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
    # Without cors_origin, no preflight is answered.
    async with open_client(side, tokenizer) as client:
        other = await client.options(
            path, headers={"origin": "http://page:1", **preflight}
        )
        assert other.status_code == 405
        assert "access-control-allow-origin" not in other.headers


async def test_operators_paths_are_closed_to_pages_of_other_sites(tokenizer):
    """A browser marks such requests with Sec-Fetch-Site, although it sends no Origin
    with a GET."""
    page = {"sec-fetch-site": "cross-site"}
    content_type = {"content-type": "application/json"}
    async with serving(tokenizer) as server:
        for path in ("/drain", "/migrate"):
            answer = await server.http.post(
                path, json={"requests": 1}, headers={**page, **content_type}
            )
            assert answer.status_code == 403, path
    async with Rig(decode=[Fake(answers(200, {}))]) as rig:
        assert (await rig.client.get("/admin/members", headers=page)).status_code == 403
        assert (await rig.client.get("/admin/members")).status_code == 200


async def test_proxy_page_reaches_its_endpoints():
    """The page's scripts reach the endpoints, and any site may link to the page."""
    async with Rig(decode=[Fake(decodes)]) as rig:
        from_link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await rig.client.get("/", headers=from_link)).status_code == 200
        signal = {"sec-fetch-site": "same-origin", "origin": rig.url}
        assert (await rig.client.get("/ui/state", headers=signal)).status_code == 200
        sent = {**signal, "content-type": "application/json"}
        assert (await post(rig.client, sent, "/v1/chat/completions")).status_code == 200
