"""One rank's model, KV pool and attention: turns a StepInput into drawn tokens.

The runner knows nothing of requests, queues or peers. It is synchronous: when `execute` returns,
every read and write of KV that the step made on this rank has finished (I8 rests on it).
"""

from dataclasses import dataclass

import torch

from attention.base import AttentionBackend
from attention.registry import create_backend
from engine.batch import StepInput, StepOutput
from engine.config import EngineConfig
from engine.sampler import SampledTokens, SamplingBatch, sample
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from model.config import ModelConfig
from model.parallel import Parallel
from model.registry import load_model
from protocol.messages import SamplingParams, TokenLogprobs

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RankMemory:
    """The allocation a rank's agent registers."""

    pool: KVPool
    backend: AttentionBackend


class ModelRunner:
    """Loads the weights of one rank; `allocate` then gives it its KV pool."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, parallel: Parallel) -> None:
        self.config = config
        self.model_config = model_config
        self.device = torch.device(config.device)
        if config.device == "cuda":
            self.device = torch.device("cuda", config.devices[parallel.rank])
        self.model = load_model(
            model_config,
            config.model_dir,
            dtype=_DTYPES[config.dtype],
            device=self.device,
            parallel=parallel,
            load_format=config.load_format,
            seed=config.seed,
        )
        self.memory: RankMemory | None = None

    def layout(self, num_blocks: int) -> KVLayout:
        """The layout of this rank's pool with `num_blocks` blocks, the null block included."""
        return KVLayout(
            order=self.config.kv_layout,
            num_blocks=num_blocks,
            num_heads=self.model.attention_spec.num_kv_heads,
            num_layers=self.model_config.num_layers,
            num_components=self.model_config.kv_components,
            block_size=self.config.block_size,
            head_dim=self.model_config.kv_dim,
            dtype=self.config.dtype,
        )

    def allocate(self, num_blocks: int) -> RankMemory:
        spec = self.model.attention_spec
        pool = KVPool(self.layout(num_blocks), device=self.device)
        backend = create_backend(
            self.config.attention_backend,
            pool,
            num_q_heads=spec.num_q_heads,
            head_dim=self.model_config.kv_dim,
            scale=spec.scale,
        )
        self.memory = RankMemory(pool, backend)
        return self.memory

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        """Computes the step's tokens, writes their KV, and draws where a sequence ends."""
        assert self.memory is not None, "allocate() comes first"
        backend = self.memory.backend
        backend.plan(step.attention_batch(self.config.block_size))
        token_ids = torch.from_numpy(step.token_ids.copy()).to(self.device)
        positions = torch.from_numpy(step.positions).to(self.device)
        hidden = self.model.forward(token_ids, positions, backend)
        if len(step.sample_rows) == 0:
            return StepOutput([], [])
        rows = torch.from_numpy(step.last_token_rows).to(self.device)
        logits = self.model.logits(hidden[rows])
        positions_drawn = step.context_lens[step.sample_rows]
        batch = SamplingBatch.from_params(step.sampling, positions_drawn.tolist(), self.device)
        return _to_output(sample(logits, batch), step.sampling)


def _to_output(drawn: SampledTokens, params: list[SamplingParams]) -> StepOutput:
    token_ids = drawn.token_ids.tolist()
    if drawn.logprobs is None:
        return StepOutput(token_ids, [None] * len(token_ids))
    chosen = drawn.logprobs.tolist()
    top_ids = drawn.top_ids.tolist() if drawn.top_ids is not None else [[]] * len(chosen)
    top = drawn.top_logprobs.tolist() if drawn.top_logprobs is not None else [[]] * len(chosen)
    logprobs = [
        TokenLogprobs(chosen[row], top_ids[row][: p.num_logprobs], top[row][: p.num_logprobs])
        if p.num_logprobs is not None
        else None
        for row, p in enumerate(params)
    ]
    return StepOutput(token_ids, logprobs)
