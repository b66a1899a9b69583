"""A function that reads one metric."""

from protocol.metrics import SPECS, Metrics


def metric(metrics: Metrics, name: str, **labels: str) -> float:
    """Return the current value of a counter or gauge, 0 if it was never set."""
    suffix = "_total" if SPECS[name].kind == "counter" else ""
    return metrics._registry.get_sample_value(name + suffix, labels) or 0.0
