"""Derives the problems of a cluster: one line each, with the cause and the fix.

This module does no I/O.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from deploy.cluster_check.facts import Facts, Proxy, Server
from deploy.cluster_check.pulls import Pull
from deploy.cluster_check.through_proxy import Route
from kvcache.transports import UcxRead
from protocol.errors import PeerIncompatible
from protocol.handshake import check_compatible
from protocol.pairing import may_pair
from protocol.registration import MAX_AGE_S
from protocol.settings.machine import is_local

_MAX_CLOCK_DIFFERENCE_S = 10.0  # below MAX_AGE_S: warn before signatures are refused
_CLOCK_FIX = "Fix: synchronize the hosts' clocks (chronyd, or timedatectl set-ntp true)"
_SECRET_FIX = "Fix: give all servers and proxies the same BATON_CLUSTER_SECRET"
# For each part of a kv_digest: what the part covers, and the options that affect it.
_DIGEST_PARTS = (
    ("the weights or config", "the same --model, --revision and --quantization"),
    ("the KV's shape, RoPE or windows", "the same --hf-overrides and --max-model-len"),
    ("the KV's type or scales", "the same --dtype, --kv-cache-dtype and --kv-scales"),
)
_FAILURES = {
    "peer_unreachable": (
        "it cannot connect to the side channel, or NIXL cannot connect",
        "open the port of --side-channel-port, advertise an address that servers reach "
        "(--side-channel-host), and check UCX_NET_DEVICES and UCX_TCP_PORT_RANGE",
    ),
    "peer_incompatible": (
        "the servers' KV is incompatible",
        "start both with the same model, revision and KV type",
    ),
    "kv_params_rejected": (
        "it rejected the reference to the KV: another cluster secret, another prompt "
        "or another clock; its log has the field",
        "give both the same BATON_CLUSTER_SECRET, --split-special-tokens and tokenizer",
    ),
    "pull_withheld": (
        "earlier pulls failed or hang, or no KV blocks are free, so it makes no "
        "attempt",
        "see its log for the first failure, and run the check again after a minute",
    ),
    "pull_timeout": (
        "the pull took too long",
        "check the link's rate (`baton doctor` on both hosts), or raise "
        "--pull-timeout-s",
    ),
    "kv_corrupt": ("the bytes differ from the lender's", "check the link and memory"),
    "lease_gone": ("the lease ended during the pull", "raise --lease-s"),
}


@dataclass(frozen=True)
class Finding:
    """One problem. Errors make the exit status 1."""

    level: Literal["error", "warning"]
    text: str


def find(
    facts: Facts, pulls: Sequence[Pull], routes: Sequence[Route], *, has_secret: bool
) -> list[Finding]:
    """Return all findings, errors first.

    Args:
        has_secret: whether the checks had a cluster secret for handshakes.
    """
    findings = [
        *(Finding("error", f"{text}. Fix: check the URL") for text in facts.unknown),
        *_processes(facts),
        *_versions(facts),
        *_digests(facts.servers),
        *_clocks(facts),
        *_side_channels(facts, pulls, has_secret=has_secret),
        *_pulls(facts, pulls),
        *_routes(facts, routes),
    ]
    return sorted(findings, key=lambda finding: finding.level)


def _processes(facts: Facts) -> Iterator[Finding]:
    ready_members: set[str] = set()
    for proxy in facts.proxies:
        yield from _members(proxy)
        ready_members |= {
            str(member["url"])
            for member in proxy.members
            if member.get("state") == "ready"
        }
        for problem in proxy.problems:
            level: Literal["error", "warning"] = "error"
            fix = "see its log"
            if proxy.is_ready:
                level = "warning"
                fix = "set BATON_ADMIN_KEY to an admin key of the proxy"
            yield Finding(level, f"proxy {proxy.url}: {problem}. Fix: {fix}")
    for server in facts.servers:
        if not server.problem:
            continue
        if server.url in ready_members and not server.report:
            yield Finding(
                "warning",
                f"{_name(server)}: {server.problem}, but its proxy reaches it. Fix: "
                "run this check on a host of the servers' network",
            )
        else:
            yield Finding(
                "error", f"{_name(server)}: {server.problem}. Fix: see its log"
            )


def _members(proxy: Proxy) -> Iterator[Finding]:
    for member in proxy.members:
        name = f"{member['server']} ({member['url']})"
        if member.get("state") != "ready":
            reason = member.get("reason") or member.get("state")
            yield Finding(
                "error",
                f"proxy {proxy.url} sends nothing to {name}: {reason}. Fix: start or "
                "undrain the server",
            )
        elif member.get("circuit") != "closed":
            yield Finding(
                "warning",
                f"proxy {proxy.url}: the circuit of {name} is {member['circuit']}, "
                "because requests failed in a row. Fix: see the server's log",
            )


def _versions(facts: Facts) -> Iterator[Finding]:
    by_version: dict[str, list[str]] = defaultdict(list)
    for proxy in facts.proxies:
        by_version[proxy.version].append(f"proxy {proxy.url}")
    for server in facts.servers:
        if version := server.report.get("version"):
            by_version[str(version)].append(server.name)
    if len(by_version) > 1:
        versions = "; ".join(
            f"{version or 'unknown'}: {', '.join(names)}"
            for version, names in sorted(by_version.items())
        )
        yield Finding(
            "warning",
            f"versions differ ({versions}), and servers of different versions may not "
            "read each other's KV. Fix: run one version",
        )


def _digests(servers: Sequence[Server]) -> Iterator[Finding]:
    """Find decode servers that cannot read a prefill server's KV of the same model.

    After a handshake with both servers, the finding names the field that differs.
    Without handshakes, it names the group of fields (_DIGEST_PARTS).
    """
    usable = [server for server in servers if server.report.get("kv_digest")]
    for target in usable:
        for source in usable:
            is_pair = source.role == "prefill" and target.role != "prefill"
            same_name = source.report["model"] == target.report["model"]
            is_compatible = may_pair(
                prefill_digest=source.report["kv_digest"],
                decode_digest=target.report["kv_digest"],
            )
            if is_pair and same_name and not is_compatible:
                yield Finding("error", _difference(source, target))


def _difference(source: Server, target: Server) -> str:
    pair = f"{target.name} cannot read the KV of {source.name}"
    if source.metadata and target.metadata:
        try:
            check_compatible(target.metadata.compat, source.metadata.compat)
        except PeerIncompatible as error:
            return f"{pair}: {error.message}"
    parts = zip(
        _DIGEST_PARTS,
        source.report["kv_digest"].split("."),
        target.report["kv_digest"].split("."),
        strict=False,
    )
    for (subject, fix), source_part, target_part in parts:
        if target_part not in (source_part, "*"):
            return f"{pair}: {subject} differ. Fix: start both with {fix}"
    return f"{pair}: their kv_digest differs. Fix: start both with the same options"


def _clocks(facts: Facts) -> Iterator[Finding]:
    offsets = {
        f"proxy {proxy.url}": proxy.clock_offset_s
        for proxy in facts.proxies
        if proxy.clock_offset_s is not None
    }
    for server in facts.servers:
        if server.clock_offset_s is not None:
            offsets[server.name] = server.clock_offset_s
    if not offsets:
        return
    first = min(offsets, key=lambda name: offsets[name])
    last = max(offsets, key=lambda name: offsets[name])
    difference_s = offsets[last] - offsets[first]
    if difference_s <= _MAX_CLOCK_DIFFERENCE_S:
        return
    yield Finding(
        "error" if difference_s > MAX_AGE_S else "warning",
        f"the clock of {last} is {difference_s:.0f} s ahead of {first}'s; beyond "
        f"{MAX_AGE_S:g} s, offers of KV and registrations are refused. {_CLOCK_FIX}",
    )


def _side_channels(
    facts: Facts, pulls: Sequence[Pull], *, has_secret: bool
) -> Iterator[Finding]:
    working_sources = {pull.source for pull in pulls if pull.has_moved}
    for server in facts.servers:
        host = str(server.report.get("side_channel_host") or "")
        url_host = urlsplit(server.url).hostname or ""
        if host and is_local(host) and not is_local(url_host):
            yield Finding(
                "error",
                f"{_name(server)} advertises the side channel {host}, which other "
                "hosts cannot reach. Fix: give it --side-channel-host",
            )
        if not server.channel_problem:
            continue
        problem = f"{_name(server)}: side channel {server.channel_problem}"
        if has_secret and "secret" in server.channel_problem:
            yield Finding("error", f"{problem}. {_SECRET_FIX}, and this check")
        elif server.name in working_sources:
            yield Finding(
                "warning",
                f"{problem}, from here; servers reach it. Fix: none is needed",
            )
        else:
            yield Finding(
                "error",
                f"{problem}. Fix: open the port of --side-channel-port between the "
                "servers, or advertise another address with --side-channel-host",
            )


def _pulls(facts: Facts, pulls: Sequence[Pull]) -> Iterator[Finding]:
    servers = {server.name: server for server in facts.servers}
    for pull in pulls:
        pair = f"{pull.source} -> {pull.target}"
        source = servers[pull.source]
        target = servers[pull.target]
        if pull.problem:
            yield Finding("error", f"{pair}: {pull.problem}. Fix: see the server's log")
        elif not pull.has_moved:
            yield Finding("error", f"{pair}: {_cause_of_failure(pull)}")
        elif pull.has_same_tokens is False:
            is_exact = {source.report["dtype"], target.report["dtype"]} == {"float32"}
            yield Finding(
                "error" if is_exact else "warning",
                f"{pair}: the answer from transferred KV differs from that of "
                f"{pull.target} alone. Fix: report it if both run float32; in "
                f"{target.report['dtype']}, rounding may choose another token",
            )
        if warning := _transport_warning(pull, source, target):
            yield Finding("warning", f"{pair}: {warning}")


def _cause_of_failure(pull: Pull) -> str:
    explanations = [_FAILURES[code] for code in pull.failure_codes if code in _FAILURES]
    codes = f" ({', '.join(pull.failure_codes)})" if pull.failure_codes else ""
    cause = "its log has the cause; set BATON_ADMIN_KEY to see it here"
    fix = "see the log of the server that pulls"
    if explanations:
        cause, fix = explanations[0]
    return f"no KV was transferred{codes}: {cause}. Fix: {fix}"


def _transport_warning(pull: Pull, source: Server, target: Server) -> str | None:
    """Return a warning if two servers on one host use a slow transport."""
    hosts = {urlsplit(server.url).hostname for server in (source, target)}
    if "/" not in pull.transport or len(hosts) > 1:
        return None
    kinds = [
        "cuda" if server.report.get("device") == "cuda" else "host"
        for server in (target, source)
    ]
    read = UcxRead(
        local=kinds[0],
        remote=kinds[1],
        where="intra-node",
        how="in use",
        transport=pull.transport,
    )
    return read.warning()


def _routes(facts: Facts, routes: Sequence[Route]) -> Iterator[Finding]:
    has_prefill = any(server.role == "prefill" for server in facts.servers)
    for route in routes:
        where = f"proxy {route.proxy}, model {route.model}"
        if route.problem:
            yield Finding(
                "error", f"{where}: a request fails ({route.problem}). Fix: see its log"
            )
        elif has_prefill and not route.num_transferred and route.reason != "placed":
            reason = route.reason or "unknown"
            yield Finding(
                "error",
                f"{where}: the decode server computed the prompt (reason: {reason}). "
                "Fix: see `decode_only` in docs/troubleshooting.md",
            )


def _name(server: Server) -> str:
    netloc = urlsplit(server.url).netloc
    return server.name if server.name == netloc else f"{server.name} ({netloc})"
