"""Functions that read metrics."""

import re

from protocol.metrics import SPECS, Metrics


def metric(metrics: Metrics, name: str, **labels: str) -> float:
    """Return the current value of a counter or gauge, 0 if it was never set."""
    suffix = "_total" if SPECS[name].kind == "counter" else ""
    return metrics._registry.get_sample_value(name + suffix, labels) or 0.0


def without_model(text: str) -> str:
    """Return the text of /metrics without the label model_name, which all metrics of a
    server have.
    """
    label = 'model_name="[^"]*"'
    return re.sub(rf"\{{{label}\}}|,{label}|{label},", "", text)
