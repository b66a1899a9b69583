"""The main program of a server: its start, its shutdown and its failures."""

import asyncio
import dataclasses
import errno
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from attention.support import UnsupportedPool
from engine.http.api import ServerHooks
from engine.prepare import StartFailure, _devices, engine_config
from engine.process.launch import Launch
from engine.serve import _describe_failure, _Server
from engine.text.tokenizer import Tokenizer
from model.config import load_config
from protocol.ipc.wire import CannotListen, bind, framed
from protocol.messages import EngineFailed, encode
from protocol.registration import open_record
from protocol.settings.settings import PrefillSettings
from tests.make_models import ensure_model
from tests.ports import reserved_ports
from tests.proxy.fakes import Call, Fake, until
from tests.rigs.scripted_engine import SMALL_ENGINE, ScriptedEngine

_SECRET = "a secret of these tests"

# A server that never finishes looking for its model. It prints its responses, and then
# sends SIGTERM to itself.
_RESOLVING_FOREVER = """
import httpx, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import engine.serve
from engine.http.api import ServerHooks
from protocol.settings.settings import PrefillSettings

def resolve(*args, progress, **options):
    progress("half of it is there")
    url = f"http://127.0.0.1:{sys.argv[1]}"
    http = httpx.Client(base_url=url, trust_env=False, timeout=60)
    while "half" not in (ready := http.get("/ready")).text:
        pass
    completion = http.post("/v1/completions", json={"prompt": "a"})
    for response in (http.get("/health"), ready, http.get("/v1/models"), completion):
        print(response.status_code, response.text, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    # A download of many files uses a pool of threads. The thread that resolves the
    # model waits for this pool, but a stop must not.
    ThreadPoolExecutor().submit(time.sleep, 600).result()

engine.serve.resolve_model = resolve
options = {"port": sys.argv[1], "cluster_secret": "a secret of these tests"}
settings = PrefillSettings(_cli_parse_args=[], **options)
raise SystemExit(
    engine.serve.run_server(settings, lambda s: ServerHooks(), "-")
)
"""


def test_server_reports_its_progress_and_stops_without_waiting_for_its_model() -> None:
    with reserved_ports(1) as (port,):
        done = subprocess.run(
            [sys.executable, "-c", _RESOLVING_FOREVER, str(port)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=Path(__file__).parents[2],
            check=False,
        )
    health, ready, models, completion = done.stdout.splitlines()[-4:]
    assert health == '200 {"status":"ok"}'
    assert ready.startswith(
        '503 {"ready":false,"reason":"half of it is there","role":"prefill"'
    )
    assert models.startswith("200 ") and models.endswith('"max_model_len":null}]}')
    assert completion.startswith("503")
    assert "starting (half of it is there); try again" in completion
    assert done.returncode == 1
    assert done.stderr.strip().endswith("error: stopped before it was ready")


class _EndingEngine(ScriptedEngine):
    """An engine that ends as soon as it is closed, before the HTTP side has ended."""

    server: _Server  # set by _make_server

    async def close(self) -> None:
        await super().close()
        self.server._engine_ended("engine process: exit status 0")
        for _ in range(3):  # until the event loop has set `failure`
            await asyncio.sleep(0)


@asynccontextmanager
async def _make_server(
    engine: _EndingEngine, **options: Any
) -> AsyncIterator[tuple[_Server, Any]]:
    """Yields a server without rank processes, and the socket on which it will serve."""
    options = {"port": 0, "cluster_secret": _SECRET, **options}
    settings = PrefillSettings(_cli_parse_args=[], **options)
    server = engine.server = _Server(settings, "-", lambda secret: ServerHooks())
    with bind("127.0.0.1", 0) as listener:
        yield server, listener
    server.processes.stop(1.0)


async def _serve(
    server: _Server,
    listener: socket.socket,
    tokenizer: Tokenizer,
    engine: _EndingEngine,
) -> int:
    server.api.client = engine
    server.api.set_model(tokenizer)
    serving = asyncio.ensure_future(server.server.serve(sockets=[listener]))
    port = listener.getsockname()[1]
    return await server._serve(port, serving)


async def test_engine_that_ends_during_the_shutdown_is_not_a_failure(tokenizer):
    engine = _EndingEngine()
    async with _make_server(engine) as (server, listener):
        server.stop_requested.set_result(None)
        assert await _serve(server, listener, tokenizer, engine) == 0
        assert server.failure.done()


async def test_signal_after_a_requested_drain_is_not_the_second_one(monkeypatch):
    """A service manager's hook calls POST /drain. The manager then sends a signal."""
    kills: list[int] = []
    monkeypatch.setattr("engine.serve.lifecycle.exit_now", kills.append)
    async with _make_server(_EndingEngine()) as (server, _):
        assert server.api.on_drain is not None
        server.api.on_drain()
        server._on_signal()
        assert server.stop_requested.done() and not kills
        server._on_signal()
        assert len(kills) == 1


async def test_server_unregisters_before_it_refuses_requests(tokenizer):
    """The fake proxy records each registration, and the status of the server's /health
    at that moment."""
    registrations: list[tuple[bool, int]] = []

    async def record_registration(call: Call) -> None:
        record = open_record(call.raw, _SECRET.encode(), int(time.time() * 1000))
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            response = await http.get(f"{record.url}/health")
        registrations.append((record.leaving, response.status_code))
        await call.answer(200, {})

    engine = _EndingEngine()
    proxy = Fake(record_registration)
    proxy.start()
    async with _make_server(engine, register=(proxy.url,)) as (server, listener):
        serving = asyncio.create_task(_serve(server, listener, tokenizer, engine))
        await until(lambda: bool(registrations))
        server.stop_requested.set_result(None)
        assert await serving == 0
    await proxy.stop()
    assert registrations == [(False, 200), (True, 200)]


async def test_server_keeps_its_engine_during_shutdown_while_kv_is_leased(tokenizer):
    engine = _EndingEngine()
    async with _make_server(engine) as (server, listener):
        server.stop_requested.set_result(None)
        engine.stats["baton_leases_held"] = 1.0
        serving = asyncio.create_task(_serve(server, listener, tokenizer, engine))
        ended, _ = await asyncio.wait({serving}, timeout=0.5)
        assert not ended and engine.healthy
        engine.stats["baton_leases_held"] = 0.0
        assert await serving == 0


async def test_client_that_still_sends_its_request_gets_503_at_the_shutdown(
    tokenizer, caplog
):
    engine = _EndingEngine()
    async with _make_server(engine, shutdown_grace_s=1.0) as (server, listener):
        serving = asyncio.create_task(_serve(server, listener, tokenizer, engine))
        listener.listen()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n"
        writer.write(head + b"expect: 100-continue\r\n\r\n{")
        # The server has begun to read the body.
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        server.stop_requested.set_result(None)
        response = await reader.read()
        writer.close()
        assert await serving == 0
    assert b"HTTP/1.1 503" in response
    assert b'"code":"no_server_available"' in response
    assert "Traceback" not in caplog.text


async def test_failed_engine_with_a_process_that_does_not_exit_is_given_up(
    tokenizer, monkeypatch
):
    monkeypatch.setattr("engine.serve._ENDING_TIMEOUT_S", 0.05)
    engine = _EndingEngine()
    async with _make_server(engine) as (server, listener):
        engine.emit(EngineFailed("rank 0 lost its device"))
        with pytest.raises(StartFailure, match="lost its device"):
            await _serve(server, listener, tokenizer, engine)


class _SilentEngine(_EndingEngine):
    """An engine that is silent at each check that is an "s" in `checks`. It fails after
    the last check."""

    def __init__(self, checks: str) -> None:
        super().__init__()
        self.checks = list(checks)

    def is_stalled(self) -> bool:
        is_silent = self.checks.pop(0) == "s"
        if not self.checks:
            self.emit(EngineFailed("all checks were made"))
        return is_silent


@pytest.mark.parametrize(
    ("checks", "reason"),
    [
        ("sss.sss.sss.", "all checks were made"),
        ("sss.ssss....", "sent nothing for 0.01 s"),
    ],
)
async def test_only_uninterrupted_silence_is_a_hang(checks, reason, monkeypatch):
    monkeypatch.setattr("engine.serve._ENDING_TIMEOUT_S", 0.0)
    engine = _SilentEngine(checks)
    # A hang is four silent checks in a row.
    async with _make_server(engine, hang_timeout_s=0.01) as (server, _):
        await server._watch_for_hang(engine)  # type: ignore[arg-type]
        assert reason in await server.failure


def test_devices_option_is_refused_on_the_cpu():
    with pytest.raises(
        StartFailure, match=r"--devices 0,1 names GPUs, .*`baton doctor`"
    ):
        _devices(PrefillSettings(_cli_parse_args=[], devices=(0, 1), tp=2), "cpu")


class _Started(Exception):
    """Raised instead of starting rank processes."""


@pytest.mark.parametrize(
    ("device", "has_gpu", "refusal"),
    [
        ("cpu", False, UnsupportedPool),
        ("cuda", True, UnsupportedPool),
        ("cuda", False, _Started),  # the ranks report the missing GPU
    ],
)
async def test_model_that_no_backend_serves_is_refused_before_ranks_start(
    monkeypatch, device, has_gpu, refusal
):
    def start(launch: Launch) -> None:
        raise _Started

    monkeypatch.setattr("engine.prepare.has_gpu", lambda: has_gpu)
    options = {"model": str(ensure_model("gqa")), "device": device}
    server_and_listener = _make_server(
        _EndingEngine(), attention_backend="flashinfer", **options
    )
    async with server_and_listener as (server, listener):
        monkeypatch.setattr(server.processes, "start", start)
        with pytest.raises(refusal):
            await server._start_and_serve(listener, asyncio.Future())


@pytest.mark.parametrize("fault", ["tokenizer", "port"])
async def test_wrong_options_are_reported_before_the_weights_are_loaded(
    monkeypatch, tmp_path, fault
):
    with bind("127.0.0.1", 0) as used:
        used.listen()
        options: dict[str, Any] = {"model": str(ensure_model("gqa")), "device": "cpu"}
        message = "use another --side-channel-port"
        if fault == "port":
            options["side_channel_port"] = used.getsockname()[1]
        else:
            for name in ("config.json", "model.safetensors"):
                (tmp_path / name).symlink_to(ensure_model("gqa") / name)
            options["model"] = str(tmp_path)
            message = r"tokenizer\.json"
        never_ready: list[socket.socket] = []

        def start(launch: Launch) -> socket.socket:
            link, engine = socket.socketpair()
            never_ready.append(engine)
            return link

        async with _make_server(_EndingEngine(), **options) as (server, listener):
            monkeypatch.setattr(server.processes, "start", start)
            with pytest.raises((CannotListen, ValueError), match=message):
                await server._start_and_serve(listener, asyncio.Future())
        for engine in never_ready:
            engine.close()


async def test_ready_engine_serves_no_request_before_the_tokenizer_is_loaded(
    monkeypatch,
):
    async with _make_server(
        _EndingEngine(), model=str(ensure_model("gqa")), device="cpu"
    ) as (server, listener):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def read(prepared: object) -> None:
            with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
                for _ in range(5):  # enough time to receive the engine's message
                    assert http.get("/ready").status_code == 503
                response = http.post("/v1/completions", json={"prompt": "a"})
                assert response.status_code == 503
            raise _Started

        link, engine = socket.socketpair()
        engine.sendall(framed(encode(SMALL_ENGINE)))
        monkeypatch.setattr(server.processes, "start", lambda config: link)
        monkeypatch.setattr("engine.serve.read_for_answers", read)
        serving = asyncio.ensure_future(server.server.serve(sockets=[listener]))
        try:
            with engine, pytest.raises(_Started):
                await server._start_and_serve(listener, serving)
        finally:
            server.server.should_exit = True
            await serving


def test_error_of_an_unreadable_file_names_the_file(tmp_path):
    error = PermissionError(
        errno.EACCES, "Permission denied", str(tmp_path / "config.json")
    )
    assert _describe_failure(error) == f"{tmp_path}/config.json: Permission denied"
    assert _describe_failure(ValueError("no such model")) == "no such model"


@pytest.mark.parametrize(
    ("model_dtype", "device", "dtype"),
    [
        ("float32", "cuda", "bfloat16"),  # also the model dtype of GGUF files
        ("float16", "cuda", "float16"),
        ("bfloat16", "cuda", "bfloat16"),
        ("auto", "cuda", "bfloat16"),  # some config.json have this dtype
        ("bfloat16", "cpu", "float32"),
    ],
)
def test_dtype_auto_depends_on_the_model_and_the_device(model_dtype, device, dtype):
    folder = ensure_model("gqa")
    model = dataclasses.replace(load_config(folder), dtype=model_dtype)
    settings = PrefillSettings(_cli_parse_args=[], device=device)
    assert engine_config(settings, b"", folder, model).dtype == dtype


def test_every_start_has_unique_ids():
    folder = ensure_model("gqa")
    settings = PrefillSettings(_cli_parse_args=[], device="cpu")
    configs = [
        engine_config(settings, b"", folder, load_config(folder)) for _ in range(9)
    ]
    assert len({config.incarnation for config in configs}) == 9
    assert len({config.engine_id for config in configs}) == 9
