"""The model whose steps show which kernels a rank is going to need."""

from dataclasses import replace
from typing import Any

import torch

from attention.registry import are_modules_compiled
from engine.config import EngineConfig
from engine.core.batch import StepInput
from engine.geometry import attention_spec, read_config
from engine.worker.cuda_graph import captured_sizes
from engine.worker.load import check_devices
from engine.worker.runner import ModelRunner
from engine.worker.warm_up import WarmUpSizes, run_step, steps
from kvcache.transfer.move.cuda_placer import placer_for
from model.config import ModelConfig
from model.parallel import Parallel, Ranks


def run_steps(config: EngineConfig) -> None:
    """Runs every kind of step of the first rank of this host, on a model with few
    layers.

    Does nothing if FlashInfer's modules are not compiled yet, because that takes
    minutes. The rank compiles these modules while it loads its weights.
    """
    check_devices(config)
    model_config = read_config(config.model_dir, config)
    rank = config.node_ranks[0]
    spec = attention_spec(config, model_config, model_config.num_heads // config.tp)
    device = torch.device(f"cuda:{config.device_of(rank)}")
    if not are_modules_compiled(config.attention_backend, spec, device):
        return
    config = config.model_copy(update={"load_format": "dummy"})
    runner = ModelRunner(
        config, first_layers(model_config), _rank_without_peers(config, rank)
    )
    num_tokens = min(config.max_num_batched_tokens, model_config.max_position)
    num_blocks = -(-num_tokens // config.tokens_per_block) * runner.groups.count
    runner.memory = runner.make_memory(num_blocks + 1)
    if config.transfer != "nixl":
        placer_for(runner.memory.pool, convert=config.kv_convert)
    for step in _all_steps(WarmUpSizes.of(runner), config.max_step_rows):
        run_step(runner, step)


def _all_steps(sizes: WarmUpSizes, max_rows: int) -> list[StepInput]:
    """The steps of the warm-up, and the decode steps that the rank captures as CUDA
    graphs."""
    captured = [sizes.step([1] * count, stored=7) for count in captured_sizes(max_rows)]
    return [*captured, *steps(sizes)]


def first_layers(model_config: ModelConfig) -> ModelConfig:
    """Returns the config of a model with only the first layers of `model_config`: as
    many as include every kind of its layers."""
    kinds = [
        (
            model_config.window_of(layer),
            model_config.rope_index(layer),
            model_config.is_moe_layer(layer),
        )
        for layer in range(model_config.num_layers)
    ]
    count = 1 + max(kinds.index(kind) for kind in set(kinds))
    changes: dict[str, Any] = {
        "num_layers": count,
        "layer_ropes": model_config.layer_ropes[:count],
        "layer_windows": model_config.layer_windows[:count],
    }
    if model_config.moe is not None:
        layers = [n for n in model_config.moe.dense_layers if n < count]
        dense_layers = type(model_config.moe.dense_layers)(layers)
        changes["moe"] = replace(model_config.moe, dense_layers=dense_layers)
    return replace(model_config, **changes)


def _rank_without_peers(config: EngineConfig, rank: int) -> Parallel:
    """A rank whose collectives send nothing."""
    if config.tp == 1:
        return Parallel(rank, 1)
    group = _NoGroup()
    context = None
    if config.dcp > 1:
        context = Ranks(rank % config.dcp, config.dcp, group)
    return Parallel(rank, config.tp, group, context, config.ep)


class _NoGroup:
    """A group without other processes: its collectives change no tensor."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self

    def wait(self) -> None:
        pass
