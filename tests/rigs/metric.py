"""What a process has counted."""

from protocol.metrics import SPECS, Metrics


def metric(metrics: Metrics, name: str, **labels: str) -> float:
    """The current value of a counter or gauge of its own, 0 when it was never
    touched.
    """
    suffix = "_total" if SPECS[name].kind == "counter" else ""
    return metrics._registry.get_sample_value(name + suffix, labels) or 0.0
