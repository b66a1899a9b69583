"""HTTPS: a proxy in front of a server, both with TLS and API keys.

The tests also check refusals, and that no answer contains secrets."""

import asyncio
import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from protocol.http.tls import Certificate, client_context
from protocol.settings.server_options import AccessOptions
from tests.proxy.fakes import Rig, until
from tests.rigs.http_server import Running, serving

CLIENT, ROOT, SERVER = (
    "sk-client-0123456789",
    "sk-root-0123456789",
    "sk-server-0123456789",
)


def make_certificate(folder: Path, name: str, *more: str) -> tuple[str, str]:
    """Makes a self-signed certificate for the loopback address. Returns the paths of
    the certificate and its key. `more` are options of openssl."""
    cert = str(folder / f"{name}.pem")
    key = str(folder / f"{name}.key")
    names = "subjectAltName=IP:127.0.0.1,IP:::1,DNS:localhost"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2".split()
    )
    command += ["-subj", f"/CN={name}", "-addext", names, "-keyout", key, "-out", cert]
    subprocess.run([*command, *(more or ("-noenc",))], check=True, capture_output=True)
    return cert, key


def tls_options(pair: tuple[str, str]) -> dict[str, Any]:
    return {"tls_cert": pair[0], "tls_key": pair[1]}


def make_proxy(url: object, **options: Any) -> Rig:
    """Returns a proxy in front of one decode server."""
    return Rig([], [Running(url)], ready=False, **options)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("tls")
    return [make_certificate(folder, name) for name in ("server", "proxy")]


async def test_keys_and_tls_work_from_client_to_server(tokenizer, pairs):
    server_pair, proxy_pair = pairs
    keys = {"admin_key": (SecretStr(SERVER),)}
    async with serving(
        tokenizer, role="decode", **tls_options(server_pair), **keys
    ) as server:
        url = str(server.http.base_url).rstrip("/")
        assert url.startswith("https:")
        options = {"api_key": (SecretStr(CLIENT),), "admin_key": (SecretStr(ROOT),)}
        sent = {"upstream_api_key": SecretStr(SERVER), "tls_ca": server_pair[0]}
        async with make_proxy(
            url, **tls_options(proxy_pair), **options, **sent
        ) as proxy:
            verified = ssl.create_default_context(cafile=proxy_pair[0])
            bearer = {"authorization": f"Bearer {CLIENT}"}
            proxy_url = proxy.url.replace("http:", "https:")
            async with httpx.AsyncClient(
                base_url=proxy_url, verify=verified, trust_env=False, headers=bearer
            ) as client:
                await until(lambda: proxy.is_ready(0))
                body = {"model": "m", "prompt": "ab", "max_tokens": 3}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                async with client.stream(
                    "POST", "/v1/completions", json={**body, "stream": True}
                ) as stream:
                    assert (await stream.aread()).endswith(b"data: [DONE]\n\n")
                pages = [await client.get(path) for path in PATHS]
                responses = [answer, stream, *pages]
                for bad in INVALID_BODIES:
                    responses.append(
                        await client.post("/v1/completions", content=json.dumps(bad))
                    )
                wrong_host = {"host": "attacker.example"}
                responses.append(await client.get("/ready", headers=wrong_host))
                await server.engine.close()
                server.engine.fail("its machine went away")
                responses.append(await client.post("/v1/completions", json=body))
                assert responses[-1].status_code >= 500
                _, _, address = url.partition("//")
                secrets = (
                    address,
                    address.partition(":")[2],
                    CLIENT,
                    ROOT,
                    SERVER,
                    "engine.sock",
                )
                for shown in responses:
                    text = f"{shown.headers} {shown.text}"
                    leaked = [secret for secret in secrets if secret in text]
                    assert not leaked, shown.url
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(trust_env=False) as stranger:
                await stranger.get(f"{url}/health")


PATHS = (
    *("/health", "/ready", "/metrics", "/stats", "/docs", "/v1/models", "/v1/models/m"),
    *(
        "/nothing",
        "/ui/state",
        "/admin/members",
        "/v1/completions",
        "/openapi.json",
        "/",
    ),
)
INVALID_BODIES: tuple[Any, ...] = (
    {"prompt": "ab", "model": "other"},
    {"prompt": 3},
    {"prompt": "a" * 200},
    {"prompt": "ab", "unknown": 1},
    {
        "prompt": "ab",
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"},
    },
    [],
)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "it has API keys: set --upstream-api-key"),
        (
            {"upstream_api_key": SecretStr("another-key")},
            "it has API keys: set --upstream-api-key",
        ),
        ({"tls_ca": None}, "certificate verify failed"),
    ],
)
async def test_server_health_gives_the_reason_if_a_key_or_certificate_is_refused(
    options, reason, tokenizer, pairs
):
    keys = {"admin_key": (SecretStr(SERVER),)}
    async with serving(tokenizer, **tls_options(pairs[0]), **keys) as server:
        url = server.http.base_url
        options = {"tls_ca": pairs[0][0], "api_key": (SecretStr(CLIENT),), **options}
        async with make_proxy(url, **options) as proxy:
            await until(lambda: reason in proxy.app.fleet.servers[0].health.reason)
            assert not proxy.is_ready(0)


async def test_proxy_without_keys_passes_the_clients_key_on(tokenizer):
    async with serving(
        tokenizer, role="decode", api_key=(SecretStr(CLIENT),)
    ) as server:
        async with make_proxy(server.http.base_url) as proxy:
            await until(lambda: proxy.is_ready(0))
            for key, status in ((CLIENT, 200), ("another-key", 401)):
                bearer = {"authorization": f"Bearer {key}"}
                answer = await proxy.client.get("/v1/models", headers=bearer)
                assert answer.status_code == status


async def test_renewed_certificate_is_served_but_not_an_incomplete_one(
    tmp_path, caplog
):
    cert, key = make_certificate(tmp_path, "old")
    ca = str(shutil.copy(cert, tmp_path / "ca"))
    certificate = Certificate(AccessOptions(**tls_options((cert, key)), tls_ca=ca))
    verified = client_context(ca)
    context = certificate.for_uvicorn()["ssl_context_factory"](None, None)
    server = await asyncio.start_server(
        lambda _, w: w.close(), "127.0.0.1", 0, ssl=context
    )
    port = server.sockets[0].getsockname()[1]

    async def served() -> bytes:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=verified)
        actual = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return bytes(actual)

    def pem(file: str) -> bytes:
        return ssl.PEM_cert_to_DER_cert(Path(file).read_text())

    renewing = asyncio.create_task(certificate.keep_reloading(0.01))
    old = pem(cert)
    assert await served() == old
    new_cert, new_key = make_certificate(tmp_path, "new")
    shutil.copy(new_cert, ca)
    Path(new_cert).replace(cert)
    await until(lambda: caplog.text.count("still uses the previous") > 1)
    assert await served() == old
    Path(ca).write_text("")  # an invalid CA file must not prevent the renewal
    Path(new_key).replace(key)
    while await served() == old:
        await asyncio.sleep(0)
    assert await served() == pem(cert)
    renewing.cancel()
    server.close()


def test_unusable_tls_files_are_refused_with_the_fix(tmp_path):
    cert, key = make_certificate(tmp_path, "one")
    other, _ = make_certificate(tmp_path, "two")
    locked = make_certificate(tmp_path, "locked", "-passout", "pass:secret")
    (tmp_path / "text").write_text("no certificate")
    text = str(tmp_path / "text")
    for pair, message in (
        ((cert, text), "give readable PEM files"),
        (
            (other, key),
            "KEY_VALUES_MISMATCH; give readable PEM files with a certificate and",
        ),
        ((text, key), "give readable PEM files"),
        ((cert, "/no/file"), "No such file"),
        (locked, "is encrypted; give an unencrypted key"),
    ):
        with pytest.raises(ValueError, match=message):
            Certificate(AccessOptions(**tls_options(pair)))
    for file, message in (
        (text, "--tls-ca .*text: .*give a PEM"),
        ("/no/file", "No such file"),
    ):
        with pytest.raises(ValueError, match=message):
            client_context(file)
