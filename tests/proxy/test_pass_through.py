"""What the proxy hands to a decode server as it is, and pages of other origins."""

import pytest

from tests.proxy.fakes import Call, Fake, Rig


async def answers(call: Call) -> None:
    await call.answer(200, {"path": call.path})


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_tokenizing_is_a_decode_servers(path: str) -> None:
    async with Rig(decode=[Fake(answers)]) as rig:
        body = b'{"prompt":  "a"}'
        response = await rig.client.post(path, content=body, headers={"x-request-id": "r"})
        assert response.json() == {"path": path}
        (call,) = rig.decode[0].calls
        assert (call.raw, call.headers["x-request-id"]) == (body, "r")
        assert rig.prefill[0].calls == []
        assert (await rig.client.get(path)).status_code == 405


@pytest.mark.parametrize("path", ["/openapi.json", "/docs", "/v1/models"])
async def test_documents_are_a_decode_servers(path: str) -> None:
    async with Rig(decode=[Fake(answers)]) as rig:
        assert (await rig.client.get(path)).json() == {"path": path}


async def test_pages_of_named_origins_alone_may_call() -> None:
    origin = "https://app.example"

    async with Rig(cors_origin=(origin,)) as rig:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        preflight = await rig.client.options("/v1/completions", headers=asked)
        assert preflight.headers["access-control-allow-origin"] == origin
        for stream in (False, True):
            response = await rig.complete(headers={"origin": origin}, stream=stream)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == origin
        other = await rig.complete(headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
