"""The HTTP client and servers behind TLS, at addresses of either kind."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from proxy.upstream import HttpUpstream, Lost, Unreachable
from tests.proxy.scripted import OK, Reader, Script, Writer

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificate")
    folder = tmp_path_factory.mktemp("tls")
    paths = folder / "certificate.pem", folder / "key.pem"
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    argv = ["openssl", *made.split(), "-addext", NAMES]
    argv += ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(argv, check=True, capture_output=True)
    return paths


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize("trusted", [True, False])
async def test_a_server_behind_tls_is_asked_if_its_certificate_is_good(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, host: str, trusted: bool
) -> None:
    async def breaks(_: Reader, writer: Writer) -> None:
        writer.write(OK[:-1])
        await writer.drain()

    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    script = Script(OK, OK, breaks)
    try:
        server = await asyncio.start_server(script, host, 0, ssl=context)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    port = server.sockets[0].getsockname()[1]
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    client = HttpUpstream(connect_timeout_s=5.0, read_timeout_s=5.0)
    try:
        if not trusted:
            with pytest.raises(Unreachable, match="self-signed"):
                await client.send(url, "GET", "/")
            return
        for _ in range(2):
            assert await (await client.send(url, "POST", "/", body=b"{}")).read() == b"ok"
        assert script.num_connections == 1
        response = await client.send(url, "GET", "/")
        with pytest.raises(Lost):
            await response.read()
    finally:
        await client.close()
        server.close()
        await server.wait_closed()
