"""`baton bench`: sends load to OpenAI endpoints and measures latencies and goodput.

    baton bench --url http://127.0.0.1:8000
    baton bench compare --a http://host-a:8000 --b http://host-b:8000
    baton bench advise --trace FILE --model MODEL --servers 4

The first two commands write a report (HTML) and a JSON document. The last line of their
output is the document without the rows of single requests. A trace is replayed at its
own times, or at --rate: a request is sent when it is due, whether or not earlier
requests have ended. Several --url get the same load at the same time.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from benchmarks.advice.options import add_advise_options
from benchmarks.bench import options as bench_options
from benchmarks.bench.errors import BenchError
from benchmarks.bench.generator import RunResult, Side, run_load
from benchmarks.bench.progress import progress
from benchmarks.bench.results.figures import client_figures, side_figures, table
from benchmarks.bench.results.report import html_report, json_document, request_rows
from benchmarks.bench.results.verdict import METRICS, compare
from protocol.settings.near_names import suggestion

SUBCOMMANDS = {
    "compare": "which of two sides wins under the same load, by how much, how sure",
    "advise": "replicas or a prefill/decode split: the predicted goodput of each",
}


class _Parser(argparse.ArgumentParser):
    """A parser that names an unknown option in its error. Plain argparse would mistake
    the option's value for a subcommand, and name the value instead.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        names = list(self._option_string_actions)
        for word in args or ():
            if word in SUBCOMMANDS:
                break
            name = word.partition("=")[0]
            is_prefix = any(option.startswith(name) for option in names)
            if name.startswith("--") and not is_prefix:
                self.error(f"unknown option {name}{suggestion(name, names)}")
        return super().parse_known_args(args, namespace)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `baton bench`, including the parsers of its subcommands."""
    parser = _Parser(
        prog="baton bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url",
        action="append",
        metavar="URL",
        help="an OpenAI endpoint, without /v1 (repeatable: all get the same load at "
        "the same time; default: http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--metrics",
        action="append",
        default=[],
        metavar="URL",
        help="a further server whose /metrics are read, such as a server behind the "
        "proxy (repeatable; only with one --url)",
    )
    bench_options.add_load_options(parser)
    subparsers = parser.add_subparsers(title="subcommands", dest="subcommand")
    compare_parser = subparsers.add_parser("compare", help=SUBCOMMANDS["compare"])
    _add_compare_options(compare_parser)
    advise_parser = subparsers.add_parser("advise", help=SUBCOMMANDS["advise"])
    add_advise_options(advise_parser)
    return parser


def _add_compare_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Send the same load to two sides at the same time, and report which side won."
    )
    for name in ("a", "b"):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            required=True,
            metavar="URL",
            help=f"the endpoints of side {name.upper()}; several are replicas that get "
            "the requests round-robin",
        )
        parser.add_argument(
            f"--{name}-metrics",
            nargs="+",
            default=[],
            metavar="URL",
            help=f"further servers of side {name.upper()} whose /metrics are read",
        )
    parser.add_argument(
        "--metric",
        choices=METRICS,
        default="goodput",
        help="metric that decides the winner (default: goodput, the requests per "
        "second within --slo)",
    )
    bench_options.add_load_options(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `baton bench`.

    Returns:
        The exit status: 0 if every request succeeded, 1 if one failed, 2 after an
        error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    name = args.subcommand or ""
    try:
        if name and words[0] != name:
            raise BenchError(f"options must follow {name}; write baton bench {name} ..")
        if name == "advise":
            from benchmarks.advice.advise import advise  # slow to import

            return advise(args)
        if name == "compare":
            return _compare(args)
        return _bench(args)
    except BenchError as error:
        prog = f"baton bench {name}".rstrip()
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2


def _bench(args: argparse.Namespace) -> int:
    given_urls = args.url or ["http://127.0.0.1:8000"]
    urls = [bench_options.server_url("--url", url) for url in given_urls]
    metrics_urls = [bench_options.server_url("--metrics", url) for url in args.metrics]
    if metrics_urls and len(urls) > 1:
        raise BenchError(
            "--metrics: with several --url it is not clear to which of them a server "
            "belongs; use one --url, or `baton bench compare` with --a-metrics"
        )
    names = bench_options.unique_names(urls)
    sides = [
        Side(name, (url,), tuple(metrics_urls))
        for name, url in zip(names, urls, strict=True)
    ]
    return _run(args, sides, metric=None)


def _compare(args: argparse.Namespace) -> int:
    sides = []
    for name in ("a", "b"):
        urls = getattr(args, name)
        metrics_urls = getattr(args, f"{name}_metrics")
        side = Side(
            name=name.upper(),
            urls=tuple(bench_options.server_url(f"--{name}", url) for url in urls),
            metrics_urls=tuple(
                bench_options.server_url(f"--{name}-metrics", url)
                for url in metrics_urls
            ),
        )
        sides.append(side)
    return _run(args, sides, metric=args.metric)


def _run(args: argparse.Namespace, sides: Sequence[Side], metric: str | None) -> int:
    """Run the load, print the figures and write the report.

    Args:
        metric: metric that decides which of two sides won; None: sides are not
            compared.
    """
    slo = bench_options.make_slo(args)
    workload = bench_options.make_workload(args)
    options = bench_options.load_options(args, workload)
    name = args.save or time.strftime("bench-%Y%m%d-%H%M%S")
    json_path, html_path = bench_options.save_paths(name)
    date = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        with progress(workload.num_requests * len(sides)) as shown:
            result: RunResult = uvloop.run(
                run_load(sides, workload, options, shown.on_end)
            )
    except BaseException:
        json_path.unlink(missing_ok=True)
        html_path.unlink(missing_ok=True)
        raise
    figures = [side_figures(side, workload, slo) for side in result.sides]
    client = client_figures(result)
    document: dict[str, Any] = json_document(
        figures,
        client,
        date=date,
        load=bench_options.describe_load(args, workload, options),
        workload=workload,
        slo=slo,
    )
    if metric is not None:
        verdict = compare(result.sides[0], result.sides[1], metric, slo)
        document["verdict"] = verdict.as_dict()
    rows = {
        side.side.name: request_rows(side, result.started_at) for side in result.sides
    }
    json_path.write_text(json.dumps({**document, "request_rows": rows}) + "\n")
    html_path.write_text(html_report(result, document, slo), encoding="utf-8")
    print(f"saved to {json_path} and {html_path}", file=sys.stderr)
    print(table(figures, client))
    if metric is not None:
        print(document["verdict"]["sentence"])
    print(json.dumps(document))
    has_failures = any(side["succeeded"] != side["requests"] for side in figures)
    return 1 if has_failures else 0


if __name__ == "__main__":
    sys.exit(main())
