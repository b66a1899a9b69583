"""How a server's main program ends."""

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
from engine.config import EngineConfig
from engine.http.api import ServerHooks
from engine.prepare import StartFailure, _devices, engine_config
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

_RESOLVING_FOR_EVER = """
import httpx, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import engine.serve
from engine.http.api import ServerHooks
from protocol.settings.settings import PrefillSettings

def resolve(*args, progress, **options):
    progress("half of it is there")
    http = httpx.Client(base_url=f"http://127.0.0.1:{sys.argv[1]}", trust_env=False, timeout=60)
    while "half" not in (ready := http.get("/ready")).text:
        pass
    asked = http.post("/v1/completions", json={"prompt": "a"})
    for answer in (http.get("/health"), ready, http.get("/v1/models"), asked):
        print(answer.status_code, answer.text, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    ThreadPoolExecutor().submit(time.sleep, 600).result()  # as a download of many files

engine.serve.resolve_model = resolve
options = {"port": sys.argv[1], "cluster_secret": "a secret of these tests"}
settings = PrefillSettings(_cli_parse_args=[], **options)
raise SystemExit(
    engine.serve.run_server(settings, lambda s: ServerHooks(), "-")
)
"""


def test_a_server_tells_what_it_waits_for_and_ends_without_it() -> None:
    with reserved_ports(1) as (port,):
        done = subprocess.run(
            [sys.executable, "-c", _RESOLVING_FOR_EVER, str(port)], capture_output=True, text=True,
            timeout=120, cwd=Path(__file__).parents[2], check=False,
        )  # fmt: skip
    alive, ready, models, asked = done.stdout.splitlines()[-4:]
    assert alive == '200 {"status":"ok"}'
    assert ready.startswith(
        '503 {"ready":false,"reason":"half of it is there","role":"prefill"'
    )
    assert models.startswith("200 ") and models.endswith('"max_model_len":null}]}')
    assert (
        asked.startswith("503") and "starting (half of it is there); try again" in asked
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("error: stopped before it was ready")


class _EndingEngine(ScriptedEngine):
    """Its process ends as soon as it is told to, before the HTTP side has ended."""

    server: _Server  # set by _serving

    async def close(self) -> None:
        await super().close()
        self.server._engine_ended("engine process: exit status 0")
        for _ in range(3):  # until the loop has heard of it
            await asyncio.sleep(0)


@asynccontextmanager
async def _made(
    engine: _EndingEngine, **options: Any
) -> AsyncIterator[tuple[_Server, Any]]:
    """A server on the running loop, without processes, and the socket that it is to listen on."""
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


async def test_an_engine_that_ends_when_told_to_is_no_failure(tokenizer):
    engine = _EndingEngine()
    async with _made(engine) as (server, listener):
        server.stop.set_result(None)
        assert await _serve(server, listener, tokenizer, engine) == 0
        assert server.failure.done()


async def test_a_registered_server_says_that_it_leaves_before_it_refuses(tokenizer):
    heard: list[tuple[bool, int]] = []

    async def takes(call: Call) -> None:
        said = open_record(call.raw, _SECRET.encode(), int(time.time() * 1000))
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            heard.append(
                (said.leaving, (await http.get(f"{said.url}/health")).status_code)
            )
        await call.answer(200, {})

    engine, proxy = _EndingEngine(), Fake(takes)
    proxy.start()
    async with _made(engine, register=(proxy.url,)) as (server, listener):
        serving = asyncio.create_task(_serve(server, listener, tokenizer, engine))
        await until(lambda: bool(heard))
        server.stop.set_result(None)
        assert await serving == 0
    await proxy.stop()
    assert heard == [(False, 200), (True, 200)]


async def test_a_server_that_ends_keeps_its_engine_while_its_kv_is_awaited(tokenizer):
    engine = _EndingEngine()
    async with _made(engine) as (server, listener):
        server.stop.set_result(None)
        engine.stats["baton_leases_held"] = 1.0
        serving = asyncio.create_task(_serve(server, listener, tokenizer, engine))
        ended, _ = await asyncio.wait({serving}, timeout=0.5)
        assert not ended and engine.healthy
        engine.stats["baton_leases_held"] = 0.0
        assert await serving == 0


async def test_a_client_still_sending_its_request_is_told_when_the_server_ends(
    tokenizer, caplog
):
    engine = _EndingEngine()
    async with _made(engine, shutdown_grace_s=1.0) as (server, listener):
        serving = asyncio.create_task(_serve(server, listener, tokenizer, engine))
        listener.listen()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n"
        writer.write(head + b"expect: 100-continue\r\n\r\n{")
        assert (
            await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        )  # it is being read
        server.stop.set_result(None)
        answer = await reader.read()
        writer.close()
        assert await serving == 0
    assert b"HTTP/1.1 503" in answer and b'"code":"no_server_available"' in answer
    assert "Traceback" not in caplog.text


async def test_an_engine_that_failed_and_does_not_end_is_given_up(
    tokenizer, monkeypatch
):
    monkeypatch.setattr("engine.serve._ENDING_TIMEOUT_S", 0.05)
    engine = _EndingEngine()
    async with _made(engine) as (server, listener):
        engine.emit(EngineFailed("rank 0 lost its device"))
        with pytest.raises(StartFailure, match="lost its device"):
            await _serve(server, listener, tokenizer, engine)


class _Watched(_EndingEngine):
    """Says at each look whether it was silent, and has failed after the last."""

    def __init__(self, silences: str) -> None:
        super().__init__()
        self.silences = list(silences)

    def is_stalled(self) -> bool:
        is_silent = self.silences.pop(0) == "s"
        if not self.silences:
            self.emit(EngineFailed("it was looked at to the end"))
        return is_silent


@pytest.mark.parametrize(
    ("silences", "told"),
    [
        ("sss.sss.sss.", "it was looked at to the end"),
        ("sss.ssss....", "sent nothing for 0.01 s"),
    ],
)
async def test_only_silence_without_a_break_is_a_hang(silences, told, monkeypatch):
    monkeypatch.setattr("engine.serve._ENDING_TIMEOUT_S", 0.0)
    engine = _Watched(silences)
    async with _made(engine, hang_timeout_s=0.01) as (server, _):  # four looks
        await server._watch_for_hang(engine)  # type: ignore[arg-type]
        assert told in await server.failure


def test_gpus_are_not_named_to_a_server_on_the_cpu():
    with pytest.raises(
        StartFailure, match=r"--devices 0,1 names GPUs, .*`baton doctor`"
    ):
        _devices(PrefillSettings(_cli_parse_args=[], devices=(0, 1), tp=2), "cpu")


class _Started(Exception):
    """Rank processes would have been."""


@pytest.mark.parametrize(
    ("device", "has_gpu", "refusal"),
    [
        ("cpu", False, UnsupportedPool),
        ("cuda", True, UnsupportedPool),
        ("cuda", False, _Started),  # to hear from the ranks that there is none
    ],
)
async def test_a_model_no_backend_serves_is_refused_at_once(
    monkeypatch, device, has_gpu, refusal
):
    def start(config: EngineConfig) -> None:
        raise _Started

    monkeypatch.setattr("engine.prepare._has_gpu", lambda: has_gpu)
    options = {"model": str(ensure_model("gqa")), "device": device}
    made = _made(_EndingEngine(), attention_backend="flashinfer", **options)
    async with made as (server, listener):
        monkeypatch.setattr(server.processes, "start", start)
        with pytest.raises(refusal):
            await server._start_and_serve(listener, asyncio.Future())


@pytest.mark.parametrize("wrong", ["tokenizer", "port"])
async def test_what_is_wrong_is_told_before_weights_are_there(
    monkeypatch, tmp_path, wrong
):
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        options: dict[str, Any] = {"model": str(ensure_model("gqa")), "device": "cpu"}
        told = "use another --side-channel-port"
        if wrong == "port":
            options["side_channel_port"] = taken.getsockname()[1]
        else:
            for name in ("config.json", "model.safetensors"):
                (tmp_path / name).symlink_to(ensure_model("gqa") / name)
            options["model"], told = str(tmp_path), r"tokenizer\.json"
        never_ready: list[socket.socket] = []

        def start(config: EngineConfig) -> socket.socket:
            link, engine = socket.socketpair()
            never_ready.append(engine)
            return link

        async with _made(_EndingEngine(), **options) as (server, listener):
            monkeypatch.setattr(server.processes, "start", start)
            with pytest.raises((CannotListen, ValueError), match=told):
                await server._start_and_serve(listener, asyncio.Future())
        for engine in never_ready:
            engine.close()


async def test_nobody_is_served_before_the_tokenizer_is_there_if_the_engine_is(
    monkeypatch,
):
    async with _made(
        _EndingEngine(), model=str(ensure_model("gqa")), device="cpu"
    ) as made:
        server, listener = made
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def read(prepared: object) -> None:
            with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
                for _ in range(5):  # in each of which the engine might be heard
                    assert http.get("/ready").status_code == 503
                asked = http.post("/v1/completions", json={"prompt": "a"})
                assert asked.status_code == 503
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


def test_a_file_that_may_not_be_read_is_named(tmp_path):
    error = PermissionError(
        errno.EACCES, "Permission denied", str(tmp_path / "config.json")
    )
    assert _describe_failure(error) == f"{tmp_path}/config.json: Permission denied"
    assert _describe_failure(ValueError("no such model")) == "no such model"


@pytest.mark.parametrize(
    ("saved", "device", "chosen"),
    [
        ("float32", "cuda", "bfloat16"),  # as every GGUF file is taken to be
        ("float16", "cuda", "float16"),
        ("bfloat16", "cuda", "bfloat16"),
        ("auto", "cuda", "bfloat16"),  # as some are saved
        ("bfloat16", "cpu", "float32"),
    ],
)
def test_the_dtype_that_auto_means(saved, device, chosen):
    folder = ensure_model("gqa")
    model = dataclasses.replace(load_config(folder), dtype=saved)
    settings = PrefillSettings(_cli_parse_args=[], device=device)
    assert engine_config(settings, b"", folder, model).dtype == chosen


def test_every_start_has_ids_of_its_own():
    folder = ensure_model("gqa")
    settings = PrefillSettings(_cli_parse_args=[], device="cpu")
    made = [engine_config(settings, b"", folder, load_config(folder)) for _ in range(9)]
    assert (
        len({one.incarnation for one in made})
        == len({one.engine_id for one in made})
        == 9
    )
