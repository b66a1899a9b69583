"""Computes the share of KV blocks in use for the metric `baton_kv_usage_ratio`."""

from collections.abc import Mapping

from protocol.metrics import stat_key


def kv_usage(engine_values: Mapping[str, float]) -> float:
    """Returns the share of KV blocks in use, from the values of an engine's metrics.

    Cached blocks that no request uses count as available, because they are evicted as
    soon as a request needs them.
    """
    capacity = engine_values.get("baton_kv_blocks_capacity", 0.0)
    if not capacity:  # the engine is not ready yet
        return 0.0
    states = (stat_key("baton_kv_blocks", state=state) for state in ("free", "cached"))
    num_available = sum(engine_values.get(key, 0.0) for key in states)
    return 1 - num_available / capacity
