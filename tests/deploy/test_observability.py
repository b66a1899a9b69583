"""Docs, dashboard and alerts name only metrics that processes expose.

The last test checks the closing line of `make test-all`.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from protocol.metrics import TABLE, Spec
from tests.closing_line import closing_line

ROOT = Path(__file__).resolve().parents[2]
METRICS_DOC = ROOT / "docs" / "metrics.md"
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"
RULES = ROOT / "deploy" / "prometheus-rules.yml"
ALERTS = ROOT / "tests" / "deploy" / "alerts.yml"


def exposed_name(spec: Spec) -> str:
    return spec.name + ("_total" if spec.kind == "counter" else "")


def row(spec: Spec) -> str:
    """Returns the line of docs/metrics.md for one metric."""
    labels = "{" + ", ".join(spec.labels) + "}" if spec.labels else ""
    return f"| `{exposed_name(spec)}{labels}` | {spec.kind} | {spec.help} |"


def test_the_docs_have_a_row_for_every_metric():
    lines = METRICS_DOC.read_text().splitlines()
    missing = [row(spec) for spec in TABLE if row(spec) not in lines]
    assert not missing, "put into docs/metrics.md:\n" + "\n".join(missing)


TEXTS = [
    ROOT / "docs" / f"{name}.md" for name in ("deployment", "troubleshooting", "tuning")
]


@pytest.mark.parametrize(
    "file", [METRICS_DOC, *TEXTS, DASHBOARD, RULES, ALERTS], ids=str
)
def test_docs_name_only_metrics_that_exist(file):
    labels_by_name = {exposed_name(spec): spec for spec in TABLE}
    for spec in TABLE:
        if spec.kind == "histogram":
            labels_by_name |= {
                f"{spec.name}_{part}": spec for part in ("bucket", "sum", "count")
            }
    named = set(re.findall(r"\bbaton_[a-z_]+", file.read_text()))
    assert named and named - labels_by_name.keys() == set()


def rules() -> list[dict[str, str]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    names: list[dict[str, str]] = group["rules"]
    return names


def test_dashboard_and_rules_use_only_labels_that_the_metrics_have():
    labels = {exposed_name(spec): spec.labels for spec in TABLE}
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [
        target["expr"] for panel in dashboard["panels"] for target in panel["targets"]
    ]
    assert len(targets) >= 10
    for expression in [*targets, *(rule["expr"] for rule in rules())]:
        for name, inside in re.findall(r"\b(baton_\w+)\{([^}]*)\}", expression):
            used_labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)) - {
                "job",
                "instance",
            }
            assert used_labels <= set(labels[name.removesuffix("_bucket")]), expression
        # Prefill servers expose these metrics too, for first tokens, so expressions
        # must filter by labels.
        assert not re.search(r"baton_(generation_tokens|inter_token)\w+\[", expression)
        assert expression.count("(") == expression.count(")")


def test_kubernetes_gets_the_same_dashboard_and_alerts():
    """Kustomize reads no files outside of its folder, so that folder has copies."""
    folder = ROOT / "deploy" / "k8s" / "components" / "monitor"
    dashboard = (folder / "grafana-dashboard.json").read_text()
    assert dashboard == DASHBOARD.read_text(), "run `make manifests`"
    rule = yaml.safe_load((folder / "prometheus-rule.yaml").read_text())
    assert rule["spec"] == yaml.safe_load(RULES.read_text()), "run `make manifests`"


def test_the_docs_have_a_row_for_every_alert():
    alerts = [rule["alert"] for rule in rules() if "alert" in rule]
    assert re.findall(r"(?m)^\| `(Baton\w+)` \|", METRICS_DOC.read_text()) == alerts


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Prometheus' promtool")
def test_alerts_fire_only_when_something_is_wrong():
    command = ["promtool", "test", "rules", ALERTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10"
 time="1.26" timestamp="2026-01-31T12:00:00"><testcase name="a"/></testsuite>
</testsuites>"""


def test_the_counts_of_the_closing_line_add_up():
    line = closing_line(REPORT, "abc")
    assert [line[key] for key in ("passed", "failed", "errors", "skipped")] == [
        4,
        2,
        1,
        3,
    ]
    assert (line["seconds"], line["started"]) == (1.3, "2026-01-31T12:00:00")
    assert line["commit"] == "abc"
