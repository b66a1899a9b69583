"""Which tensor-parallel sizes a model allows; no torch: servers ask before they load anything."""

from model.config import ModelConfig
from model.errors import ModelError


class InvalidParallelism(ModelError):
    """A tensor-parallel size that does not fit the model."""


def check_parallelism(config: ModelConfig, size: int, dcp: int = 1) -> None:
    """Raises InvalidParallelism unless `size` ranks can share the model, and the `size / dcp`
    groups of ranks that hold the same KV heads its KV heads."""
    problem = _problem(config, size)
    if problem:
        sizes = [n for n in range(1, config.num_heads + 1) if not _problem(config, n)]
        raise InvalidParallelism(f"--tp {size} {problem}; use {' or '.join(map(str, sizes))}")
    groups, kv_heads = size // dcp, config.kv_heads_total
    if kv_heads % groups and groups % kv_heads:
        raise InvalidParallelism(
            f"--dcp {dcp} with --tp {size} makes {groups} groups of ranks, which neither "
            f"divides nor is a multiple of the model's {kv_heads} KV heads; use another --dcp"
        )


def _problem(config: ModelConfig, size: int) -> str | None:
    if size < 1:
        return "is less than 1"
    if config.num_heads % size:
        return f"does not divide the model's {config.num_heads} query heads"
    kv_heads = config.kv_heads_total
    if kv_heads % size and size % kv_heads:
        return f"neither divides nor is a multiple of the model's {kv_heads} KV heads"
    widths = {"intermediate_size": config.intermediate_size}
    if config.moe:
        widths["moe_intermediate_size"] = config.moe.expert_intermediate_size
    for name, width in widths.items():
        if width % size:
            return f"does not divide the model's {name} {width}"
    return None
