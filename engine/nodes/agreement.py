"""Checks that all nodes of one server have the same model and options.

The effective values of options are compared. Each node has replaced "auto" before.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from engine.config import EngineConfig
from engine.nodes.messages import NodeReport
from model.config import ModelConfig
from model.sizes import fingerprint
from protocol.short_repr import short_repr

# Fields of EngineConfig that may differ between nodes. Some describe a single node,
# some are used only by node 0, and some name the model. Models are compared by their
# fingerprints instead.
_MAY_DIFFER = frozenset(
    {
        "cluster_secret",
        "chat_template",
        "devices",
        "engine_id",
        "incarnation",
        "log_level",
        "model",
        "model_dir",
        "node_host",
        "node_rank",
        "rendezvous",
        "rendezvous_file",
        "rendezvous_timeout_s",
        "revision",
        "served_model_name",
        "side_channel_advertise",
        "side_channel_host",
        "side_channel_port",
        "store_fd",
        "store_port",
        "threads",
    }
)


def report_of(config: EngineConfig, model_config: ModelConfig) -> NodeReport:
    """Returns the report of this node. Reads the weight files for the fingerprint.

    Raises:
        OSError: a weight file cannot be read.
    """
    model = config.model
    if config.revision:
        model = f"{model} revision {config.revision}"
    values = config.model_dump(mode="json", exclude=set(_MAY_DIFFER))
    return NodeReport(
        fingerprint=fingerprint(
            model_config,
            Path(config.model_dir),
            load_format=config.load_format,
            seed=config.seed,
        ),
        model=model,
        options={name: json.dumps(value) for name, value in values.items()},
    )


def find_difference(reports: Mapping[int, NodeReport]) -> str | None:
    """Returns a message about the first difference, or None if all nodes agree.

    Options are compared before models, because an option may change the model.

    Args:
        reports: the reports of all nodes, by node number.
    """
    first = reports[0]
    for number in sorted(reports):
        other = reports[number]
        for name, value in first.options.items():
            other_value = other.options.get(name)
            if other_value != value:
                option = "--" + name.replace("_", "-")
                text = _display_text(value)
                other_text = _display_text(other_value)
                return (
                    f"nodes 0 and {number} differ in {option}: {text} on node 0, "
                    f"{other_text} on node {number}; give every node the same options "
                    "except --node-rank"
                )
        if first.fingerprint != other.fingerprint:
            return (
                f"nodes 0 and {number} have different models: {first.model} with "
                f"fingerprint {first.fingerprint[:12]} on node 0, {other.model} with "
                f"fingerprint {other.fingerprint[:12]} on node {number}; give every "
                "node the same --model, and --revision, with the same files"
            )
    return None


def _display_text(value: str | None) -> str:
    """Returns the value of an option as a user would write it, shortened if long.

    Args:
        value: the value of an option as JSON; None: the node has no such option.
    """
    if value is None:
        return "unknown"
    content = json.loads(value)
    if isinstance(content, str) and len(content) <= 80:
        return content
    return short_repr(content)
