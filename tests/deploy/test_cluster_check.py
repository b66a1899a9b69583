"""`baton doctor URL...`: findings, the choice of pairs, and fake and real clusters."""

import json
import socket
from dataclasses import replace
from typing import Any

import pytest

from deploy.cluster_check.client import Client
from deploy.cluster_check.facts import Facts, Proxy, Server, collect
from deploy.cluster_check.findings import find
from deploy.cluster_check.pulls import Pull, choose_pairs
from deploy.cluster_check.through_proxy import Route
from deploy.doctor import main
from protocol.http.access import REDACTED
from tests.make_models import ensure_model
from tests.proxy.fakes import Fake, Rig, answers, decodes
from tests.rigs.cluster import (
    SECRET,
    Cluster,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    started,
)

REPORT = {
    "ready": True,
    "model": "m",
    "version": "1",
    "device": "cpu",
    "dtype": "float32",
    "tp": 1,
    "dcp": 1,
    "max_model_len": 400,
    "kv_digest": "a.b.c",
    "side_channel_host": "10.0.0.1",
    "side_channel_port": 9,
}


def server(name: str, **changes: Any) -> Server:
    role = name.partition("-")[0]
    report = {**REPORT, "role": role, **changes}
    return Server(f"http://10.0.0.1/{name}", name, report=report, clock_offset_s=0.0)


P = server("prefill-0")
D = server("decode-0")
MOVED = Pull(
    source="prefill-0",
    target="decode-0",
    kv={"transferred": 100, "recomputed": 0, "skipped": 0},
    seconds=0.01,
    num_bytes=1e6,
    transport="cma/memory",
    has_same_tokens=True,
)


def texts(
    *servers: Server,
    proxies: tuple[Proxy, ...] = (),
    pulls: tuple[Pull, ...] = (MOVED,),
    routes: tuple[Route, ...] = (),
) -> list[str]:
    """Return the findings as lines."""
    facts = Facts(proxies, servers)
    findings = find(facts, pulls, routes, has_secret=True)
    return [f"{finding.level}: {finding.text}" for finding in findings]


def test_healthy_cluster_has_no_findings():
    proxy = Proxy("http://p", version="1", is_ready=True, clock_offset_s=0.5)
    route = Route("http://p", "m", num_transferred=9, num_prompt_tokens=9)
    assert texts(P, D, proxies=(proxy,), routes=(route,)) == []


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        (
            (P, server("decode-0", version="2")),
            ["warning: versions differ (1: prefill-0; 2: decode-0)", "Fix: run one"],
        ),
        (
            (P, server("decode-0", kv_digest="x.b.c")),
            ["error: decode-0 cannot read", "weights or config differ", "--revision"],
        ),
        (
            (P, server("decode-0", kv_digest="a.b.x")),
            ["KV's type or scales differ", "--kv-cache-dtype"],
        ),
        (
            (P, replace(D, clock_offset_s=70.0)),
            ["error: the clock of decode-0 is 70 s ahead of prefill-0's", "chronyd"],
        ),
        (
            (P, replace(D, clock_offset_s=-20.0)),
            ["warning: the clock of prefill-0 is 20 s ahead of decode-0's"],
        ),
        (
            (server("prefill-0", side_channel_host="127.0.0.1"), D),
            ["error: prefill-0", "advertises the side channel 127.0.0.1", "--side-ch"],
        ),
        (
            (replace(P, channel_problem="10.0.0.1:9: the MAC is wrong: secrets"), D),
            ["error: prefill-0", "the MAC is wrong", "same BATON_CLUSTER_SECRET"],
        ),
        (
            (replace(P, channel_problem="10.0.0.1:9: Connection refused"), D),
            ["warning: prefill-0", "Connection refused, from here; servers reach it"],
        ),
        (
            (P, replace(D, problem="it is not ready (loading)")),
            ["error: decode-0", "it is not ready (loading)"],
        ),
    ],
)
def test_problem_of_servers_is_named_with_its_fix(servers, words):
    (line,) = texts(*servers)
    assert [word for word in words if word not in line] == []
    assert "Fix: " in line


@pytest.mark.parametrize(
    ("pull", "words"),
    [
        (
            replace(MOVED, kv={"recomputed": 9}, failure_codes=("peer_unreachable",)),
            ["error: prefill-0 -> decode-0", "(peer_unreachable)", "--side-channel-"],
        ),
        (
            replace(MOVED, kv={"recomputed": 9}, failure_codes=("kv_params_rejected",)),
            ["another cluster secret", "same BATON_CLUSTER_SECRET"],
        ),
        (replace(MOVED, kv={}), ["no KV was transferred: its log has the cause"]),
        (replace(MOVED, problem="the prefill leg fails: x"), ["the prefill leg fails"]),
        (replace(MOVED, has_same_tokens=False), ["error:", "differs from that of"]),
        (replace(MOVED, transport="tcp/lo"), ["warning:", "by tcp/lo", "leave cma"]),
    ],
)
def test_problem_of_a_pull_is_named_with_its_fix(pull, words):
    (line,) = texts(P, D, pulls=(pull,))
    assert [word for word in words if word not in line] == []


def test_rounding_of_other_types_is_only_a_warning():
    pair = [server(name, dtype="bfloat16") for name in ("prefill-0", "decode-0")]
    (line,) = texts(*pair, pulls=(replace(MOVED, has_same_tokens=False),))
    assert line.startswith("warning:")


def test_problems_of_a_proxy_and_its_requests_are_named():
    members = (
        {"server": "decode-1", "url": "u", "state": "not_ready", "reason": "gone"},
        {"server": "decode-2", "url": "v", "state": "ready", "circuit": "open"},
    )
    proxy = Proxy("http://p", "1", is_ready=True, members=members)
    placed = Route("http://p", "m", num_prompt_tokens=9, reason="placed")
    lines = texts(
        P, D, proxies=(proxy,), routes=(placed, replace(placed, reason="unavailable"))
    )
    assert [line.partition(":")[0] for line in lines] == ["error", "error", "warning"]
    assert "sends nothing to decode-1 (u): gone" in lines[0]
    assert "computed the prompt (reason: unavailable)" in lines[1]
    assert "the circuit of decode-2 (v) is open" in lines[2]


def test_pairs_of_prefill_and_decode_servers_come_first_and_are_bounded():
    servers = [server(f"prefill-{index}") for index in range(2)]
    servers += [server(f"decode-{index}") for index in range(2)]
    servers.append(server("decode-2", kv_digest="other.b.c"))
    servers.append(replace(server("decode-3"), problem="it is not ready"))
    pairs, num_left = choose_pairs(servers, 100)
    names = [(source.name, target.name) for source, target in pairs]
    assert len(set(names)) == len(names) == 6 and num_left == 0
    assert {target for _, target in names[:2]} == {"decode-0", "decode-1"}
    assert set(names[4:]) == {("decode-0", "decode-1"), ("decode-1", "decode-0")}
    assert [len(choose_pairs(servers, 3)[0]), choose_pairs(servers, 3)[1]] == [3, 3]
    few, _ = choose_pairs([*servers[2:4], *servers[:2]], 2)
    assert sorted(each.name for pair in few for each in pair) == [
        "decode-0",
        "decode-1",
        "prefill-0",
        "prefill-1",
    ]
    groups = server("decode-0", dcp=2)
    assert choose_pairs([groups, server("decode-1")], 9)[0] == [
        (server("decode-1"), groups)
    ]


async def facts_of(*urls: str) -> Facts:
    async with Client(key=None, ca_file=None, timeout_s=30) as client:
        return await collect(client, urls, None, 30)


async def test_urls_of_other_programs_and_closed_ports_are_named():
    other = Fake(decodes, pages={"/ready": answers(404, {"hello": 1})})
    hidden = Fake(decodes, pages={"/ready": answers(200, {"ready": True, **REDACTED})})
    for fake in (other, hidden):
        fake.start()
    facts = await facts_of(other.url, "http://127.0.0.1:1", hidden.url)
    assert "is neither a proxy nor a server" in facts.unknown[0]
    assert facts.unknown[1].endswith("cannot be reached from here (Connection refused)")
    assert "set BATON_ADMIN_KEY" in facts.servers[0].problem
    for fake in (other, hidden):
        await fake.stop()


async def test_servers_of_a_proxy_are_checked_unless_it_needs_a_key():
    page = {"/ready": answers(200, {**REPORT, "role": "decode"})}
    async with Rig([], [Fake(decodes, pages=page)]) as rig:
        facts = await facts_of(rig.url)
        (decode,) = facts.servers
        assert (decode.name, decode.role) == ("decode-0", "decode")
        assert abs(facts.proxies[0].clock_offset_s or 99) < 2
    async with Rig(admin_key=("operator's",)) as rig:
        facts = await facts_of(rig.url)
        assert facts.servers == ()
        assert "its servers are not listed" in facts.proxies[0].problems[0]


async def test_servers_with_one_name_at_two_proxies_are_distinguished():
    def fake() -> Fake:
        return Fake(
            decodes, pages={"/ready": answers(200, {**REPORT, "role": "decode"})}
        )

    async with Rig([], [fake()]) as first, Rig([], [fake()]) as second:
        facts = await facts_of(first.url, second.url)
        addresses = {
            rig.decode[0].url.removeprefix("http://") for rig in (first, second)
        }
        assert {server.name for server in facts.servers} == addresses


@pytest.mark.slow
def test_real_cluster_is_checked_by_real_pulls(capsys, monkeypatch):
    model = ensure_model("gqa")
    with started(
        lambda: start_prefill(model),
        lambda: start_decode(model),
        lambda: start_decode(model, name="other", BATON_CLUSTER_SECRET="x" * 32),
    ) as (prefill, decode, stranger):
        proxy = start_proxy([prefill], [decode])
        with running(proxy):
            _check_real_cluster(
                Cluster([prefill], [decode], proxy, model), capsys, monkeypatch
            )
            assert main([prefill.url, stranger.url, "--json"]) == 1
            report = _last_json(capsys)
            errors = [each["text"] for each in report["findings"]]
            assert any("another cluster secret" in text for text in errors), errors
            decode.kill()
            assert main([proxy.url]) == 1
            output = capsys.readouterr().out
            assert "ERROR: proxy" in output and "Connection refused" in output


def _last_json(capsys: Any) -> dict[str, Any]:
    """Return the last JSON line of the output, which also has lines of servers."""
    lines = capsys.readouterr().out.splitlines()
    report = json.loads([line for line in lines if line.startswith("{")][-1])
    assert isinstance(report, dict)
    return report


def _check_real_cluster(
    cluster: Cluster, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([cluster.url, "--json"]) == 0
    report = _last_json(capsys)
    assert report["findings"] == []
    (pull,) = report["pulls"]
    assert pull["kv"]["transferred"] > 0 and pull["kv"]["recomputed"] == 0
    assert pull["has_same_tokens"] is True and pull["num_bytes"] > 0
    assert pull["path"] and "/" in pull["transport"]
    (route,) = report["routes"]
    assert 0 < route["num_transferred"] == route["num_prompt_tokens"]
    monkeypatch.setenv("BATON_CLUSTER_SECRET", SECRET)
    assert main([cluster.prefill[0].url, cluster.decode[0].url]) == 0
    output = capsys.readouterr().out
    assert output.count("handshake ok") == 2 and "nothing needs fixing" in output
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "y" * 32)
    assert main([cluster.prefill[0].url]) == 1
    assert "different cluster secret" in capsys.readouterr().out


def test_checks_end_in_time(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts nothing
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main([url, "--limit-s", "0.2", "--timeout-s", "60"]) == 1
    assert "did not end within 0.2 s" in capsys.readouterr().out
