"""One rank's model, KV pool and attention: turns a StepInput into drawn tokens.

The runner knows nothing of requests, queues or peers. When the result of a launched step is there,
every read and write of KV that the step made has finished (I8 rests on it): reading the drawn
tokens waits for the step, and a step that draws nothing is waited for.
"""

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from attention.base import AttentionBackend
from attention.dcp import ContextParallelBackend
from attention.registry import backend_class, compile_modules, create_backend
from engine.config import EngineConfig
from engine.core.batch import Int32s, Int64s, PendingStep, StepFailed, StepInput, StepOutput
from engine.core.logits_processing import LogitShaper, Shaping
from engine.geometry import check_attention, step_limits, wanted_of
from engine.process.host_memory import free_host_bytes
from engine.sampling.sampler import SampledTokens, SamplingBatch, greedy, is_greedy, sample
from engine.sampling.scoring import PendingScores, score
from engine.worker.cuda_graph import DecodeGraphs, DecodeOutput
from engine.worker.in_flight_step import LastSampledTokens, LaunchedStep
from engine.worker.kernel_watch import KERNELS
from engine.worker.memory import check_weights_fit, fitting, free_gpu_bytes, lower_for_steps
from engine.worker.rehearsal import Stage, steps
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.stepping import Stepping
from kvcache.stripe import Stripe
from model.base import CausalLM
from model.config import ModelConfig
from model.files import num_weights
from model.parallel import Parallel
from model.registry import load_model
from model.sizes import num_elements
from protocol.messages import SamplingParams

logger = logging.getLogger("baton.engine")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_STREAM_PRIORITY = -1

# Graphs keep their logits, in the model's dtype and in float32, and the activations of one step.
_GRAPH_BYTES_PER_LOGIT = 6
_GRAPHS_BASE_BYTES = 512 * 2**20


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
        self.device = _device(config, parallel.rank)
        # What cannot attend is refused before minutes are spent on loading weights.
        check_attention(config, model_config)
        backend_class(config.attention_backend, config.device, model_config.kv_components)
        compiling = self._compile_beside()
        self.model = self._load(parallel)
        compiling.result()
        self.shaper = LogitShaper(model_config.vocab_size, self.device)
        self.last_drawn = LastSampledTokens(config.max_num_seqs, self.device)
        self.stepping = Stepping()
        self.memory: RankMemory | None = None
        self.graphs: DecodeGraphs | None = None

    def _compile_beside(self) -> Future[None]:
        """Has what is missing of the attention kernels compiled while weights are loaded."""
        config, model = self.config, self.model_config
        wanted = wanted_of(config, model, model.num_heads // config.tp)
        pool = ThreadPoolExecutor(1, "compile")
        done = pool.submit(
            compile_modules,
            config.attention_backend,
            wanted,
            self.device,
            appends=config.dcp > 1,
            free_bytes=free_host_bytes(),
        )
        pool.shutdown(wait=False)
        return done

    def _load(self, parallel: Parallel) -> CausalLM:
        config = self.config
        self._check_weights_fit()
        fix = f"use a larger --tp than {config.tp}, or free the GPU"
        with fitting(f"a model with weights in {config.dtype}", self.device, fix):
            return load_model(
                self.model_config,
                config.model_dir,
                dtype=_DTYPES[config.dtype],
                device=self.device,
                parallel=parallel,
                load_format=config.load_format,
                seed=config.seed,
                pack=config.pack_weights,
            )

    def _check_weights_fit(self) -> None:
        """Of a GPU; a machine's memory is looked at before its ranks are started."""
        config = self.config
        if config.device != "cuda":
            return
        is_dummy = config.load_format == "dummy"
        elements = (
            num_elements(self.model_config) if is_dummy else num_weights(Path(config.model_dir))
        )
        free, total = torch.cuda.mem_get_info(self.device)
        needed = elements // config.tp * _DTYPES[config.dtype].itemsize  # more: some are whole
        check_weights_fit(needed, free, total, config=config, device=str(self.device))

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
            dtype=self.config.kv_dtype,
        )

    def allocate(self, num_blocks: int) -> RankMemory:
        """Makes the KV pool and what reads it."""
        fix = "another process may have taken it meanwhile: lower --gpu-memory-utilization"
        with fitting(f"a KV pool of {num_blocks} blocks", self.device, fix):
            self.memory = self._make_memory(num_blocks)
        if scratch := self.memory.backend.workspace_bytes:
            logger.info("attention: %.0f MiB beside the KV pool per rank", scratch / 2**20)
        return self.memory

    def _make_memory(self, num_blocks: int) -> RankMemory:
        spec = self.model.attention_spec
        pool = KVPool(self.layout(num_blocks), self.device, self.config.kv_scales)

        def make(over: KVPool, num_q_heads: int) -> AttentionBackend:
            return create_backend(
                self.config.attention_backend,
                over,
                num_q_heads=num_q_heads,
                head_dim=self.model_config.kv_dim,
                scale=spec.scale,
                dtype=_DTYPES[self.config.dtype],
                limits=step_limits(self.config, of_group=num_q_heads > spec.num_q_heads),
            )

        context = self.model.parallel.context
        if context is None:
            return RankMemory(pool, make(pool, spec.num_q_heads))
        backend = ContextParallelBackend(
            Stripe(context.rank, context.size, self.config.block_size),
            context,
            pool,
            make,
            num_q_heads=spec.num_q_heads,
            head_dim=self.model_config.kv_dim,
            scale=spec.scale,
            scratch_tokens=max(self._longest, self.config.max_num_batched_tokens),
        )
        return RankMemory(pool, backend)

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence that any pool might hold."""
        return self.config.max_model_len or self.model_config.max_position

    def kv_budget_bytes(self) -> int:
        """GPU memory that this rank's KV may take: what is free under the configured utilization
        once the largest step has run and been measured."""
        config = self.config
        what = f"a step of {config.max_num_batched_tokens} tokens beside the model's weights"
        fix = f"lower {lower_for_steps(config)}, or use a larger --tp"
        with fitting(what, self.device, fix):
            self._run_largest_step()
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        graphs = config.max_num_seqs * self.model_config.vocab_size * _GRAPH_BYTES_PER_LOGIT
        return free_gpu_bytes(
            self.device,
            config.gpu_memory_utilization,
            peak_bytes=peak + (0 if config.enforce_eager else graphs + _GRAPHS_BASE_BYTES),
        )

    @torch.inference_mode()
    def _run_largest_step(self) -> None:
        """One prompt as long as a step may be, and as many draws."""
        num_tokens = min(self.config.max_num_batched_tokens, self.model_config.max_position)
        num_blocks = -(-num_tokens // self.config.tokens_per_block)
        torch.cuda.reset_peak_memory_stats(self.device)
        memory = self._make_memory(num_blocks + 1)
        lens = np.array([num_tokens], np.int32)
        step = StepInput(
            token_ids=np.zeros(num_tokens, np.int64),
            query_lens=lens,
            context_lens=lens,
            block_tables=np.arange(1, num_blocks + 1, dtype=np.int32)[None],
            sample_rows=np.zeros(1, np.int32),
            sampling=[SamplingParams(temperature=0.0)],
        )
        hidden = self._forward(memory.backend, step)
        rows = min(self.config.max_num_seqs, num_tokens)
        params = [SamplingParams(temperature=1.0, top_k=50, top_p=0.9)] * rows
        batch = SamplingBatch.from_params(params, [0] * rows, self.device)
        sample(self.model.logits(hidden[:rows]), batch)
        torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Captures decode steps, unless told not to or where nothing can be captured."""
        if self.device.type != "cuda" or self.config.enforce_eager:
            return
        assert self.memory is not None, "allocate() comes first"
        layout = self.memory.pool.layout
        needed = -(-self._longest // self.config.tokens_per_block)
        max_blocks = min(needed, layout.num_blocks - 1)
        try:
            graphs = DecodeGraphs(
                self.model,
                self.memory.backend,
                self.last_drawn,
                max_seqs=self.config.max_num_seqs,
                max_blocks=max_blocks,
                block_size=self.config.tokens_per_block,
                device=self.device,
            )
        except NotImplementedError as error:
            logger.warning("decode runs without CUDA graphs, which is slower: %s", error)
            return
        fix = "lower --gpu-memory-utilization or --max-num-seqs, or use --enforce-eager"
        with fitting("what CUDA graphs need", self.device, fix):
            graphs.capture()
        self.graphs = graphs

    def rehearse(self) -> None:
        """Runs every kind of step once, so that no request waits for what is compiled or loaded.
        Every rank does, in the same order; no block has an owner yet."""
        assert self.memory is not None, "allocate() comes first"
        started_s, num_kernels = time.monotonic(), KERNELS.num_before
        stage = Stage(
            num_blocks=self.memory.pool.layout.num_blocks,
            block_size=self.config.tokens_per_block,
            max_len=self._longest,
            max_tokens=self.config.max_num_batched_tokens,
            max_seqs=self.config.max_num_seqs,
        )
        for step in steps(stage):
            try:
                self._rehearse(step)
            except StepFailed as error:  # of one rank, which has gone on; so would a request's
                logger.warning("a step of %d tokens fails: %s", len(step.token_ids), error)
        self.shaper = LogitShaper(self.model_config.vocab_size, self.device)
        logger.info(
            "ran every kind of step in %.1f s; they loaded %d kernels",
            time.monotonic() - started_s,
            KERNELS.num_before - num_kernels,
        )

    def _rehearse(self, step: StepInput) -> None:
        pending = self.launch(step)
        if step.is_masked and self.model.parallel.rank == 0:
            words = -(-self.model_config.vocab_size // 32)
            pending.draw(np.full((len(step.sampling), words), -1, np.int32))
        pending.result()

    @property
    def depth(self) -> int:
        """Steps that may be under way when another is launched: on a CPU there is nothing that
        the work between two steps could hide behind."""
        return 1 if self.device.type == "cuda" else 0

    def execute(self, step: StepInput) -> StepOutput:
        """A step, from its arrays to the drawn tokens."""
        return self.launch(step).result()

    def check(self, step: StepInput) -> None:
        """Finds what would end a GPU's context, or come after other ranks have begun the step.

        Raises:
            StepFailed: a token id that the model does not have.
        """
        ids = [int(step.token_ids.max())]
        for setup in step.shapes.setups if step.shapes else ():
            ids += [max(named) for named in (setup.bias, setup.prompt_ids) if named]
        ids += [max(rows.targets) for rows in step.scores]
        if max(ids) >= self.model_config.vocab_size:
            raise StepFailed(
                f"token {max(ids)} is none of the model's {self.model_config.vocab_size}"
            )

    @torch.inference_mode()
    def launch(self, step: StepInput) -> PendingStep:
        """Begins a step that computes its tokens, writes their KV, and draws where a sequence
        ends. Results are to be asked for in the order of the launches.

        Raises:
            StepFailed: it did not begin, or only in part, and can be taken again.
        """
        self.stepping.launching()
        with self._failing_alone():
            pending = self._begin(step)
            self.stepping.launched(pending.has_ended)
        return pending

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Makes a StepFailed of what is no fault of the device, where no other rank takes part."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            if self.model.parallel.size > 1:
                raise  # the other ranks have begun it
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # raises where it is the device that failed
                torch.cuda.empty_cache()
            self.stepping.launched(lambda: True)
            raise StepFailed(f"{type(error).__name__}: {error}") from error

    def _begin(self, step: StepInput) -> LaunchedStep:
        assert self.memory is not None, "allocate() comes first"
        if self.device.type == "cpu":
            self.memory.pool.use(int(step.block_tables.max()))
        if step.copies:
            self.memory.pool.copy_blocks(step.copies)
        if len(step.sample_rows) == 0:
            rows = None if step.scores else np.zeros(1, np.int64)  # all that is wanted is its KV
            hidden = self._forward(self.memory.backend, step, rows)
            scores = score(self.model, hidden, step.scores)
            return LaunchedStep(None, [], self.device, scores)
        if step.is_masked:
            return self._launch_masked(step)
        drawn, scores = self._draw(step)
        self.last_drawn.keep(drawn.token_ids)
        return LaunchedStep(drawn, step.sampling, self.device, scores)

    def _draw(self, step: StepInput) -> tuple[SampledTokens, PendingScores]:
        # Uploads come before the step, whose launch they might wait for.
        shaping = self.shaper.prepare(step.shapes)
        if shaping is None and is_greedy(step.sampling):
            launched = self._launch(step)
            drawn_ids = launched.greedy_ids
            if drawn_ids is None:
                drawn_ids = greedy(launched.raw_logits)
            return SampledTokens(drawn_ids), launched.scores
        batch = self._sampling_batch(step)
        launched = self._launch(step)
        drawn = sample(launched.logits, batch, shaping)
        self._share(drawn)
        return drawn, launched.scores

    def _launch_masked(self, step: StepInput) -> LaunchedStep:
        """Rank 0 alone learns the masks; the others take what it draws."""
        shaping = self.shaper.prepare(step.shapes)
        batch = self._sampling_batch(step)
        launched = self._launch(step)
        if self.model.parallel.rank:
            drawn = SampledTokens(torch.zeros_like(batch.seed))
            self._share(drawn)
            self.last_drawn.keep(drawn.token_ids)
            return LaunchedStep(drawn, step.sampling, self.device, launched.scores)
        draw = partial(self._draw_masked, launched, batch, shaping)
        return LaunchedStep(None, step.sampling, self.device, launched.scores, draw)

    @torch.inference_mode()
    def _draw_masked(
        self, launched: DecodeOutput, batch: SamplingBatch, shaping: Shaping | None, masks: Int32s
    ) -> SampledTokens:
        with self._failing_alone():
            drawn = sample(launched.logits, batch, self.shaper.masked(shaping, masks))
            self._share(drawn)
            self.last_drawn.keep(drawn.token_ids)
        return drawn

    def _share(self, drawn: SampledTokens) -> None:
        """Where steps are launched ahead, every rank feeds the next one what rank 0 drew."""
        if self.depth:
            self.model.parallel.broadcast(drawn.token_ids)

    def _sampling_batch(self, step: StepInput) -> SamplingBatch:
        positions = step.context_lens[step.sample_rows]
        return SamplingBatch.from_params(step.sampling, positions.tolist(), self.device)

    def _launch(self, step: StepInput) -> DecodeOutput:
        """Runs the step up to the logits of the R rows that draw."""
        assert self.memory is not None, "allocate() comes first"
        if self.graphs is not None and self.graphs.can_run(step):
            self.last_drawn.check(int(step.token_ids.min()))
            return self.graphs.run(step)
        if not step.scores:
            hidden = self._forward(self.memory.backend, step, step.last_token_rows)
            return DecodeOutput(self.model.raw_logits(hidden), None)
        hidden = self._forward(self.memory.backend, step)
        logits = self.model.raw_logits(hidden[self._to_device(step.last_token_rows)])
        return DecodeOutput(logits, None, score(self.model, hidden, step.scores))

    def _forward(
        self, backend: AttentionBackend, step: StepInput, rows: Int64s | None = None
    ) -> torch.Tensor:
        """Hidden states of all tokens of the step, or of those `rows` only."""
        backend.plan(step.attention_batch(self.config.tokens_per_block))
        token_ids = self._to_device(step.token_ids.copy())
        if self.last_drawn.check(int(step.token_ids.min())):
            token_ids = self.last_drawn.fill_in(token_ids)
        positions = self._to_device(step.positions)
        wanted = None if rows is None else self._to_device(rows)
        return self.model.forward(token_ids, positions, backend, wanted)

    def _to_device(self, array: Int64s) -> torch.Tensor:
        """On a GPU without waiting for what it still computes."""
        host = torch.from_numpy(array)
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)


def check_devices(config: EngineConfig) -> None:
    """Every rank looks at all ranks' GPUs, before they wait for each other.

    Raises:
        ValueError: one is not there.
    """
    if config.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no GPU here: use --device cpu")
    count = torch.cuda.device_count()
    for rank, index in enumerate(config.devices):
        if index >= count:
            raise ValueError(
                f"rank {rank} is to run on GPU {index}, but this machine has {count} "
                f"(0 to {count - 1}): choose others with --devices, or a smaller --tp"
            )


def _device(config: EngineConfig, rank: int) -> torch.device:
    """The device of a rank, made current in this thread where it is a GPU."""
    if config.device != "cuda":
        return torch.device(config.device)
    check_devices(config)
    index = config.devices[rank]
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise ValueError(
            "PYTORCH_CUDA_ALLOC_CONF asks for expandable segments, whose memory other processes "
            "cannot map: KV could not be pulled from here; unset it"
        )
    torch.cuda.set_device(index)
    # Above the pulls of this process (their streams have priority 0), so that they slow no step.
    torch.cuda.set_stream(torch.cuda.Stream(index, priority=_STREAM_PRIORITY))  # type: ignore[no-untyped-call, unused-ignore]
    return torch.device("cuda", index)
