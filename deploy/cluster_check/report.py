"""Runs all checks of a cluster in order, and prints the tables or the JSON."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.cluster_check.client import DATE_ERROR_S, Client
from deploy.cluster_check.facts import Facts, Server, collect
from deploy.cluster_check.findings import Finding, find
from deploy.cluster_check.pulls import Pull, choose_pairs, pull
from deploy.cluster_check.through_proxy import Route, follow

_WIDTH = 160  # width of the report in columns, if the output is not a terminal


@dataclass(frozen=True)
class Options:
    """The options of the checks; DoctorSettings explains them.

    `key` is the first admin key, or the first API key if there is no admin key.
    """

    urls: Sequence[str]
    key: str | None
    secret: bytes | None
    ca_file: str | None
    timeout_s: float
    limit_s: float
    max_pairs: int


@dataclass(frozen=True)
class Report:
    """The results of all checks.

    Attributes:
        num_untested_pairs: number of pairs that --max-pairs has left out.
        is_complete: whether all checks were made within --limit-s.
    """

    facts: Facts
    pulls: list[Pull]
    routes: list[Route]
    findings: list[Finding]
    num_untested_pairs: int
    is_complete: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "proxies": [asdict(proxy) for proxy in self.facts.proxies],
            "servers": [_server_json(server) for server in self.facts.servers],
            "pulls": [asdict(each) for each in self.pulls],
            "routes": [asdict(route) for route in self.routes],
            "findings": [asdict(finding) for finding in self.findings],
            "pairs_left_out": self.num_untested_pairs,
            "complete": self.is_complete,
        }


def _server_json(server: Server) -> dict[str, Any]:
    return {
        "url": server.url,
        "name": server.name,
        "problem": server.problem,
        "clock_offset_s": server.clock_offset_s,
        "side_channel_problem": server.channel_problem,
        "report": server.report,
    }


def check_cluster(options: Options, *, as_json: bool) -> int:
    """Check a cluster and print the report.

    Returns 1 if the findings have an error, else 0. Raises ValueError if `ca_file`
    cannot be used.
    """
    report = asyncio.run(_check(options))
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        _print(report)
    return int(any(finding.level == "error" for finding in report.findings))


async def _check(options: Options) -> Report:
    facts = Facts()
    pulls: list[Pull] = []
    routes: list[Route] = []
    num_untested = 0
    is_complete = True
    client = Client(
        key=options.key, ca_file=options.ca_file, timeout_s=options.timeout_s
    )
    async with client:
        try:
            async with asyncio.timeout(options.limit_s):
                facts = await collect(
                    client, options.urls, options.secret, options.timeout_s
                )
                pairs, num_untested = choose_pairs(facts.servers, options.max_pairs)
                for source, target in pairs:
                    _show_progress(f"pulling KV: {source.name} -> {target.name}")
                    pulls.append(await pull(client, source, target))
                for proxy in facts.proxies:
                    _show_progress(f"sending a request through {proxy.url}")
                    routes += await follow(client, proxy.url)
        except TimeoutError:
            is_complete = False
    _show_progress("")
    findings = find(facts, pulls, routes, has_secret=options.secret is not None)
    if not is_complete:
        text = (
            f"the checks did not end within {options.limit_s:g} s. Fix: raise --limit-s"
        )
        findings.insert(0, Finding("error", text))
    return Report(facts, pulls, routes, findings, num_untested, is_complete)


def _show_progress(text: str) -> None:
    """Replace the progress line on standard error, if standard error is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _print(report: Report) -> None:
    console = Console(
        width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False
    )
    processes = _table(
        *("process", "role", "version", "model", "runs on"),
        *("KV digest", "clock", "side channel from here"),
    )
    for proxy in report.facts.proxies:
        clock = _clock(proxy.clock_offset_s)
        processes.add_row(proxy.url, "proxy", proxy.version, "", "", "", clock, "")
    for server in report.facts.servers:
        processes.add_row(*_server_cells(server))
    console.print(processes)
    if report.pulls:
        table = _table(
            *("pull", "transferred / recomputed / cached", "time", "rate"),
            *("path", "transport", "same tokens"),
        )
        for each in report.pulls:
            table.add_row(*_pull_cells(each))
        console.print(table)
    for route in report.routes:
        if not route.problem:
            reason = f" (decode server alone: {route.reason})" if route.reason else ""
            console.print(
                f"through {route.proxy}, {route.model}: {route.num_transferred} of "
                f"{route.num_prompt_tokens} prompt tokens transferred{reason}"
            )
    if report.num_untested_pairs:
        console.print(
            f"{report.num_untested_pairs} more pairs of servers were not tested "
            "(--max-pairs)"
        )
    for finding in report.findings:
        console.print(f"{finding.level.upper()}: {finding.text}", soft_wrap=True)
    if not report.findings:
        console.print("nothing needs fixing")


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _clock(offset_s: float | None) -> str:
    if offset_s is None:
        return "-"
    shown_s = 0.0 if abs(offset_s) <= 2 * DATE_ERROR_S else offset_s
    return f"{shown_s:+.0f} s" if shown_s else "as here"


def _server_cells(server: Server) -> tuple[str, ...]:
    report = server.report
    name = f"{server.name} {server.url}"
    if server.problem:
        return (name, server.role, "", "", server.problem, "", "", "")
    runs_on = f"{report.get('device')}, {report.get('dtype')}, TP {report.get('tp')}"
    channel = "does not work" if server.channel_problem else "connected"
    if server.metadata:
        channel = "handshake ok"
    return (
        name,
        server.role,
        str(report.get("version", "")),
        str(report.get("model", "")),
        runs_on,
        ".".join(part[:6] for part in str(report.get("kv_digest", "")).split(".")),
        _clock(server.clock_offset_s),
        channel,
    )


def _pull_cells(each: Pull) -> tuple[str, ...]:
    name = f"{each.source} -> {each.target}"
    if each.problem:
        return (name, "failed", "", "", "", "", "")
    kv = each.kv or {}
    sources = " / ".join(
        str(kv.get(source, 0)) for source in ("transferred", "recomputed", "skipped")
    )
    seconds = "-" if each.seconds is None else f"{each.seconds * 1e3:.1f} ms"
    rate = "-"
    if each.seconds and each.num_bytes:
        rate = f"{each.num_bytes / each.seconds / 1e9:.2f} GB/s"
    same = {True: "yes", False: "NO", None: "-"}[each.has_same_tokens]
    return (
        name,
        sources,
        seconds,
        rate,
        each.path or "-",
        each.transport or "-",
        same,
    )
