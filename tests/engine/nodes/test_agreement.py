"""All nodes get the same message about the first difference between them."""

import json

import pytest

from engine.config import EngineConfig
from engine.nodes.agreement import find_difference, report_of
from engine.nodes.messages import NodeReport
from model.config import load_config
from tests.make_models import ensure_model


def _report(*, fingerprint: str = "0" * 32, **options: object) -> NodeReport:
    values = {"block_size": 64, "kv_cache_dtype": "auto", **options}
    return NodeReport(
        fingerprint=fingerprint,
        model="a/model",
        options={name: json.dumps(value) for name, value in values.items()},
    )


def test_equal_nodes_have_no_difference():
    assert find_difference({0: _report(), 1: _report(), 2: _report()}) is None


def test_a_different_option_is_named_with_both_values():
    message = find_difference(
        {0: _report(), 1: _report(), 2: _report(block_size=32, fingerprint="1" * 32)}
    )
    assert message == (
        "nodes 0 and 2 differ in --block-size: 64 on node 0, 32 on node 2; give every "
        "node the same options except --node-rank"
    )


def test_a_different_model_is_named():
    message = find_difference({0: _report(), 1: _report(fingerprint="1" * 32)})
    assert message is not None
    assert message.startswith("nodes 0 and 1 have different models: a/model with")
    assert "000000000000 on node 0" in message and "111111111111 on node 1" in message


@pytest.mark.parametrize(
    ("field", "value", "is_equal"),
    [
        ("node_rank", 1, True),
        ("devices", (3,), True),
        ("threads", 7, True),
        ("log_level", "debug", True),
        ("model", "elsewhere", True),
        ("max_num_seqs", 3, False),
        ("dtype", "bfloat16", False),
        ("role", "prefill", False),
        ("node_timeout_s", 9.0, False),
        ("scales", (2.0,), False),
    ],
)
def test_only_what_belongs_to_one_node_may_differ(field, value, is_equal):
    model = ensure_model("gqa")
    model_config = load_config(model)
    config = EngineConfig(engine_id="a", incarnation="b", model_dir=str(model), tp=2)
    other = config.model_copy(update={field: value})
    reports = {0: report_of(config, model_config), 1: report_of(other, model_config)}
    assert (find_difference(reports) is None) == is_equal
