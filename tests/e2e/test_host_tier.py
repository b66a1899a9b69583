"""Servers of a host keep their KV in a store.

After KV was evicted, or its server was killed, the same servers and others pull it from
the store. Every answer equals that of a single server without a store.
"""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.make_models import ensure_model
from tests.rigs.client import (
    MODEL,
    Stream,
    complete_all,
    fresh_prompt,
    greedy,
    parse_kv,
    post,
)
from tests.rigs.cluster import (
    ENGINE_ARGV,
    Server,
    all_ready,
    assert_idle,
    running,
    start,
    start_decode,
    start_prefill,
    start_proxy,
    started,
    wait_until,
)
from tests.rigs.hosts import Hosts, missing_requirement
from tests.rigs.programs import BATON, Program, child_pid, launched

pytestmark = pytest.mark.slow

STORE_BYTES = 64 << 20
SMALL = ("--kv-cache-tokens", "2048", "--max-model-len", "1024")
FP8 = ("--kv-cache-dtype", "float8_e4m3fn")
# The model, the options of all servers, and those of the first and second server.
KINDS: dict[str, Any] = {
    "gqa": ("gqa", (), ("--block-size", "16"), ("--tp", "2", "--kv-layout", "LBCNHD")),
    "mla": ("mla", (), ("--block-size", "32"), ("--tp", "2", "--dcp", "2")),
    "fp8": ("gqa", FP8, ("--tp", "2"), ("--block-size", "32")),
}


def start_store(*argv: str, **env: str) -> Server:
    return start(
        "engine.store",
        *("--port", "0", "--host-kv-bytes", str(STORE_BYTES), *argv),
        name="kv",
        **env,
    )


def host_kv(store: Server) -> tuple[str, ...]:
    return (*SMALL, "--host-kv", f"127.0.0.1:{store.port}", "--kv-verify", "all")


def complete(
    server: Server, prompt: list[int], num_tokens: int = 20, **members: Any
) -> tuple[list[int], dict[str, int]]:
    """Return the tokens of an answer, and the number of prompt tokens by KV source."""
    response = post(server.url, **greedy(prompt, num_tokens, **members))
    assert response.status_code == 200, response.text
    tokens = response.json()["choices"][0]["token_ids"]
    return tokens, parse_kv(response.headers["x-baton-kv"])


def has_store(server: Server) -> bool:
    return server.metrics().get("baton_host_kv_up") == 1


def num_demoted(server: Server, outcome: str = "stored") -> float:
    return server.metrics()[f'baton_host_kv_demotions_total{{outcome="{outcome}"}}']


def num_promoted(server: Server) -> float:
    return server.metrics()['baton_kv_pulled_tokens_total{source="host"}']


def evict(server: Server) -> None:
    """Fill the prefix cache of a server with other prompts."""
    for _ in range(3):
        complete(server, fresh_prompt(900), 1)


def until_demoted(server: Server, num_before: float = 0) -> None:
    """Wait until the server has demoted KV to the store and none of its blocks is
    leased.
    """
    wait_until(lambda: num_demoted(server) > num_before)
    wait_until(server.all_blocks_free)


@pytest.mark.parametrize("kind", KINDS)
def test_kv_is_pulled_from_the_store_by_servers_of_any_geometry(kind):
    """A server evicts the KV of a prompt, and pulls it back from the store. Another
    server of different geometry, and a successor of the killed first server, pull it
    too.
    """
    name, shared, options_a, options_b = KINDS[kind]
    model = ensure_model(name)
    with started(start_store) as (store,):
        tier = (*host_kv(store), *shared)
        all_options_a = (*tier, *options_a)
        all_options_b = (*tier, *options_b)
        start_a = partial(start_decode, model, *all_options_a)
        with started(
            start_a,
            partial(start_decode, model, *all_options_b),
            partial(start_decode, model, *shared),
        ) as (a, b, lone_server):
            wait_until(lambda: has_store(a) and has_store(b))
            prompt = fresh_prompt(500)
            tokens, kv = complete(a, prompt)
            assert tokens == complete(lone_server, prompt)[0]
            assert kv["recomputed"] == 500
            until_demoted(a)
            evict(a)
            second = [*prompt, *tokens, 5, 6, 7]
            expected, _ = complete(lone_server, second)
            for server in (a, b):
                tokens, kv = complete(server, second)
                assert tokens == expected
                assert kv["transferred"] >= 448 and kv["skipped"] == 0
                assert num_promoted(server) == kv["transferred"]
            assert_idle(a, b)
            a.kill()
            with started(start_a) as (successor,):
                wait_until(lambda: has_store(successor))
                tokens, kv = complete(successor, second)
                assert tokens == expected and kv["transferred"] >= 448
                assert_idle(successor)


def test_servers_continue_while_the_store_is_killed_and_restarted():
    model = ensure_model("gqa")
    store = start_store()
    with running(store):
        with started(
            partial(start_decode, model, *host_kv(store)), partial(start_decode, model)
        ) as (server, lone_server):
            wait_until(lambda: has_store(server))
            prompts = [fresh_prompt(300) for _ in range(6)]
            complete(server, prompts[0])
            until_demoted(server)
            streams = [Stream(server.url, prompt, 200) for prompt in prompts]
            for stream in streams:
                stream.wait_for_events(5)
            store.kill()
            for stream, prompt in zip(streams, prompts, strict=True):
                stream.assert_tokens(complete(lone_server, prompt, 200)[0])
            wait_until(lambda: not has_store(server))
            evict(server)
            assert complete(server, prompts[0])[1]["recomputed"] == 300
            successor = start_store("--port", str(store.port))
            with running(successor):
                wait_until(lambda: has_store(server))
                before = num_demoted(server)
                tokens, _ = complete(server, prompts[1])
                until_demoted(server, before)
                evict(server)
                answer, kv = complete(server, [*prompts[1], *tokens])
                assert kv["transferred"] >= 256
                assert answer == complete(lone_server, [*prompts[1], *tokens])[0]
            assert_idle(server)


def test_prefill_server_pulls_from_the_store_what_it_has_evicted():
    model = ensure_model("gqa")
    with started(start_store) as (store,):
        with started(
            partial(start_prefill, model, *host_kv(store), "--block-size", "16"),
            partial(start_decode, model, *host_kv(store)),
        ) as (prefill, decode):
            wait_until(lambda: has_store(prefill) and has_store(decode))
            proxy = start_proxy([prefill], [decode])
            with running(proxy):
                prompt = fresh_prompt(500)
                tokens, _ = complete(proxy, prompt)
                until_demoted(prefill)
                until_demoted(decode)
                for _ in range(4):
                    complete(proxy, fresh_prompt(900), 1)
                before = num_promoted(prefill)
                second = [*prompt, *tokens, 9]
                answer = post(proxy.url, **greedy(second, 20))
                leg = parse_kv(answer.headers["x-baton-kv-prefill"])
                assert leg["recomputed"] < 100
                assert num_promoted(prefill) - before >= 448
                lone = partial(start_decode, model)
                with started(lone) as (lone_server,):
                    expected, _ = complete(lone_server, second)
                assert answer.json()["choices"][0]["token_ids"] == expected
                assert_idle(prefill, decode)


def test_server_of_another_host_pulls_from_a_store(tmp_path):
    """The store on host a listens at a network address. The server on host b is not
    connected to a store, so the proxy sends it hints to that store. The hosts share no
    memory.
    """
    if lacking := missing_requirement():
        pytest.skip(lacking)
    model = ensure_model("gqa")
    with contextlib.closing(Hosts("a", "b", folder=tmp_path)) as hosts:
        size = ("--host-kv-bytes", str(STORE_BYTES))
        at_a = ("--host", hosts.address("a"))
        store = hosts.start("a", "engine.store", "--port", "0", *at_a, *size, name="kv")
        server = ("decode_server", "--model", str(model), *ENGINE_ARGV, *SMALL)
        use = ("--host-kv", f"{store.host}:{store.port}")
        owner = hosts.start("a", *server, *use, "--side-channel-host", store.host)
        other = hosts.start("b", *server, "--side-channel-host", hosts.address("b"))
        urls = ("--decode", owner.url, "--decode", other.url)
        more = ("--port", "0", "--health-interval-s", "0.2", "--routing", "round_robin")
        proxy = hosts.start("b", "proxy", *urls, *more, name="proxy")
        with hosts.inside("b"):
            wait_until(lambda: all_ready(proxy) and has_store(owner))
            prompt = fresh_prompt(500)
            expected, _ = complete(owner, prompt)
            until_demoted(owner)
            answers = [complete(proxy, prompt)[0] for _ in range(2)]
            # The requests go to the two servers alternately. Before each request, other
            # prompts evict the first prompt's KV on both servers. The proxy keeps track
            # of that.
            for _ in range(2):
                for _ in range(8):
                    complete(proxy, fresh_prompt(900), 1)
                answers.append(complete(proxy, prompt)[0])
            assert answers == [expected] * 4
            assert num_promoted(other) >= 448
            assert_idle(owner, other)


def test_stopped_server_leaves_all_its_kv_in_the_store():
    """The server is stopped right after its answer. Its successor pulls all full blocks
    that the server has computed.
    """
    model = ensure_model("gqa")
    with started(start_store) as (store,):
        start_server = partial(start_decode, model, *host_kv(store))
        prompt = fresh_prompt(900)
        with started(start_server) as (server,):
            wait_until(lambda: has_store(server))
            tokens, _ = complete(server, prompt)
            assert server.stop() == 0
        with started(start_server) as (successor,):
            wait_until(lambda: has_store(successor))
            answer, kv = complete(successor, prompt)
            assert answer == tokens
            assert kv["transferred"] == 896


# -- baton up


@pytest.fixture
def cluster(tiny_model: Path) -> Iterator[tuple[Program, str, dict[str, str]]]:
    """Yield a running `baton up` with a store, its URL, and the URLs of its parts."""
    options = ["--model", str(tiny_model), "--served-model-name", MODEL, "--port", "0"]
    options += ["--device", "cpu", "--dtype", "float32", "--host-kv-bytes", "200000000"]
    options += ["--prefill.threads", "1", "--decode.threads", "1"]
    with launched([*BATON, "up", *options]) as program:
        assert "0.2 GiB of host memory" in program.read_until("KV store: ")
        url = program.read_until("ready http").split()[1].rstrip("/")
        parts = dict(
            re.findall(
                r"(decode|prefill) serves at (http\S+)", "\n".join(program.lines)
            )
        )
        yield program, url, parts
        program.process.send_signal(signal.SIGINT)
        assert program.end() == 0


def server_at(url: str) -> Server:
    child: Any = None
    return Server("server", child, int(url.rpartition(":")[2]), {})


def test_killed_decode_server_recomputes_only_the_tail_of_its_streams(cluster):
    program, url, parts = cluster
    decode = server_at(parts["decode"])
    wait_until(lambda: has_store(decode))
    prompts = [fresh_prompt(300 + 50 * index) for index in range(10)]
    expected = [answer.token_ids for answer in complete_all(url, prompts, 600)]
    before = num_demoted(decode)
    streams = [Stream(url, prompt, 600) for prompt in prompts]
    for stream in streams:
        stream.wait_for_events(150)
    wait_until(lambda: num_demoted(decode) > before)
    os.kill(child_pid(program.process.pid, "decode_server"), signal.SIGKILL)
    program.read_until("baton | decode-0 is ready again at ")
    for stream, tokens in zip(streams, expected, strict=True):
        stream.assert_tokens(tokens)
    # At most the last two blocks of each stream were not demoted. The store has all
    # full blocks of the prompt.
    metrics = decode.metrics()
    num_computed = metrics["baton_engine_step_prompt_tokens_total"]
    assert num_computed <= len(prompts) * 2 * 64
    assert num_promoted(decode) >= sum(map(len, prompts)) - len(prompts) * 64


def test_killed_store_is_restarted_and_servers_use_it_again(cluster):
    program, url, parts = cluster
    decode = server_at(parts["decode"])
    wait_until(lambda: has_store(decode))
    prompt = fresh_prompt(300)
    (expected,) = complete_all(url, [prompt], 100)
    os.kill(child_pid(program.process.pid, "engine.store"), signal.SIGKILL)
    program.read_until("baton | kv ended: ")
    (answer,) = complete_all(url, [prompt], 100)
    assert answer.token_ids == expected.token_ids
    program.read_until("baton | kv is ready again at ")
    wait_until(lambda: has_store(decode), 60)


def test_store_without_enough_memory_is_left_out_with_one_line(tiny_model):
    options = ["--model", str(tiny_model), "--served-model-name", MODEL, "--port", "0"]
    options += ["--device", "cpu", "--host-kv-bytes", str(1 << 45)]
    with launched([*BATON, "up", *options]) as program:
        line = program.read_until("the servers run without a KV store")
        assert "--host-kv-bytes" in line and "bytes of memory are free" in line
        url = program.read_until("ready http").split()[1].rstrip("/")
        (answer,) = complete_all(url, [fresh_prompt(50)], 4)
        assert len(answer.token_ids) == 4
        program.process.send_signal(signal.SIGINT)
        assert program.end() == 0
