"""The in-process pair with a real model on both sides."""

import itertools
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from attention.registry import create_backend
from engine.core.batch import PendingStep, StepInput
from engine.worker.memory import RankMemory
from engine.worker.runner import ModelRunner
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from model.config import load_config
from model.parallel import Parallel
from protocol import kv_params
from protocol.handshake import CompatRecord
from protocol.messages import AddRequest
from tests.rigs.engine_pair import SECRET, Pair, make_config
from tests.rigs.shadow import MemoryTransport


class _Runner:
    """An executor: one model over a pool."""

    depth = 0

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def blocks_under_way(self) -> set[int]:
        return set()

    def launch(self, step: StepInput) -> PendingStep:
        return self._runner.launch(step)


class RealPair(Pair):
    """Both engines run `model` in float32; requests are answered one at a time."""

    limits: ClassVar[dict[str, int]] = {"max_model_len": 400, "max_num_batched_tokens": 150}

    def __init__(self, model: Path, *, p_block_size: int, d_block_size: int) -> None:
        self._model = model
        config = self._config = load_config(model)
        self.compat = CompatRecord(
            model_fingerprint="the same",
            kv_dtype="float32",
            num_layers=config.num_layers,
            total_kv_heads=config.kv_heads_total,
            num_components=config.kv_components,
            head_dim=config.kv_dim,
            rope=config.rope_canonical,
        )
        self._names = itertools.count()
        super().__init__(p_block_size=p_block_size, d_block_size=d_block_size)

    def make_pool(self, block_size: int, order: str) -> KVPool:
        config = self._config
        return KVPool(
            KVLayout(
                order,
                120,
                config.num_kv_heads,
                config.num_layers,
                config.kv_components,
                block_size,
                config.kv_dim,
                "float32",
            )
        )

    def make_executor(self, pool: KVPool) -> Any:
        config = make_config(model_dir=str(self._model), block_size=pool.layout.block_size)
        runner = ModelRunner(config, self._config, Parallel())
        spec = runner.model.attention_spec
        backend = create_backend(
            "auto",
            pool,
            num_q_heads=spec.num_q_heads,
            head_dim=self._config.kv_dim,
            scale=spec.scale,
        )
        runner.memory = RankMemory(pool, backend)
        return _Runner(runner)

    def decode_alone(self, request: AddRequest) -> MemoryTransport:
        """What D sends for the request by itself."""
        return self._answer(request)

    def prefill_and_decode(self, request: AddRequest) -> MemoryTransport:
        """What D sends with P's reference."""
        name = f"p{next(self._names)}"
        replace = msgspec.structs.replace
        self.p.core.round([replace(request, request_id=name, max_tokens=1, retain_kv=True)])
        self.until(lambda: len(self.p.out.terminals(name)) == request.num_choices)
        offered = self.p.out.terminals(name)[0].kv_transfer_params
        params = kv_params.parse(offered)
        params.verify(SECRET)
        digest = kv_params.sampling_digest(request.sampling, request.stop_token_ids)
        assert params.sampling_digest == digest
        return self._answer(replace(request, remote=kv_params.to_remote_prefill(params)))

    def _answer(self, request: AddRequest) -> MemoryTransport:
        out = self.d.out = self.d.core.transport = MemoryTransport()
        name = f"d{next(self._names)}"  # a pull's name is used once
        self.d.core.round([msgspec.structs.replace(request, request_id=name)])
        self.until(lambda: len(out.terminals(name)) == request.num_choices)
        assert all(end.error is None for end in out.terminals(name))
        replace = msgspec.structs.replace
        out.deltas = [replace(delta, request_id=request.request_id) for delta in out.deltas]
        return out
