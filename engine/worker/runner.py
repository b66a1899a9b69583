"""One rank's model, KV pool and attention: turns a StepInput into drawn tokens.

The runner knows nothing of requests, queues or peers. When the result of a launched step is there,
every read and write of KV that the step made has finished (I8 rests on it): reading the drawn
tokens waits for the step, and a step that draws nothing is waited for.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core.batch import (
    Int32s,
    Int64s,
    PendingStep,
    StepFailed,
    StepInput,
    StepOutput,
)
from engine.core.logits_processing import LogitShaper, Shaping, to_device
from engine.geometry import kv_groups, layout_of
from engine.sampling.sampler import (
    LastSampledTokens,
    PendingScores,
    SampledTokens,
    greedy,
    is_greedy,
    sample,
    score,
)
from engine.sampling.sampling_batch import SamplingBatch
from engine.worker.cuda_graph import DecodeGraphs, DecodeOutput, PromptGraphs
from engine.worker.load import load, open_device
from engine.worker.memory import RankMemory, fitting, longest, make_memory
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.step_watch import StepWatch
from model.config import ModelConfig
from model.parallel import Parallel
from protocol.messages import SamplingParams

logger = logging.getLogger("baton.engine")


class LaunchedStep:
    """See batch.PendingStep. Copies what was drawn to the host without waiting for it.

    Args:
        drawn: None where nothing is, or not yet.
        params: of each draw.
        draw: draws the tokens of a masked step.
    """

    def __init__(
        self,
        drawn: SampledTokens | None,
        params: list[SamplingParams],
        device: torch.device,
        scores: PendingScores,
        draw: Callable[[Int32s], SampledTokens] | None = None,
    ) -> None:
        self._params = params
        self._device = device
        self._scores = scores
        self._draw = draw
        self._drawn: SampledTokens | None = None
        self._finished: torch.cuda.Event | None = None
        if draw is None:
            self._take(drawn)

    def draw(self, masks: Int32s) -> None:
        assert self._draw is not None, "the step has no masks"
        self._take(self._draw(masks))
        self._draw = None

    def _take(self, drawn: SampledTokens | None) -> None:
        if drawn is not None:
            self._drawn = SampledTokens(
                drawn.token_ids.to("cpu", non_blocking=True),
                drawn.logprobs and drawn.logprobs.on_host(),
            )
        if self._device.type == "cuda":
            self._finished = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            self._finished.record(torch.cuda.current_stream(self._device))

    def has_ended(self) -> bool:
        """Whether the device has; any thread may ask. On a CPU a launched step has ended."""
        if self._device.type != "cuda":
            return True
        return self._finished is not None and bool(self._finished.query())  # type: ignore[no-untyped-call, unused-ignore]

    def result(self) -> StepOutput:
        assert self._draw is None, "the tokens of a masked step are to be drawn first"
        if self._finished is not None:
            self._finished.synchronize()
        scores = self._scores.result()
        if self._drawn is None:
            return StepOutput([], [], scores)
        token_ids: list[int] = self._drawn.token_ids.tolist()
        if self._drawn.logprobs is None:
            return StepOutput(token_ids, [None] * len(token_ids), scores)
        counts = [params.num_logprobs for params in self._params]
        found = self._drawn.logprobs.rows([k or 0 for k in counts])
        wanted = [
            None if k is None else row for row, k in zip(found, counts, strict=True)
        ]
        return StepOutput(token_ids, wanted, scores)


class ModelRunner:
    """Loads the weights of one rank; `allocate` then gives it its KV pool."""

    memory: RankMemory  # once it is allocated

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        parallel: Parallel,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config, self.model_config = config, model_config
        self.groups, _ = kv_groups(model_config)
        self.device = open_device(config, parallel.rank)
        vocab_size = model_config.vocab_size
        self.shaper = LogitShaper(vocab_size, config.max_num_seqs, self.device)
        self.model = load(config, model_config, parallel, self.device, tell)
        self.last_drawn = LastSampledTokens(
            config.max_num_seqs, vocab_size, self.device
        )
        self.stepping = StepWatch()
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None

    def layout(self, num_blocks: int) -> KVLayout:
        """The layout of this rank's pool with `num_blocks` blocks, the null block included."""
        return layout_of(self.config, self.model_config, num_blocks)

    def allocate(self, num_blocks: int) -> RankMemory:
        """Makes the KV pool and what reads it."""
        fix = "another process may have taken it meanwhile: lower --gpu-memory-utilization"
        with fitting(f"a KV pool of {num_blocks} blocks", self.device, fix):
            self.memory = self.make_memory(num_blocks)
        if scratch := self.memory.backend.workspace_bytes:
            logger.info(
                "attention: %.0f MiB beside the KV pool per rank", scratch / 2**20
            )
        return self.memory

    def make_memory(self, num_blocks: int) -> RankMemory:
        scales = self.config.scales if self.groups.count == 1 else ()  # else they are 1
        pool = KVPool(self.layout(num_blocks), self.device, scales, self.groups)
        return make_memory(self.config, self.model_config, self.model, pool)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Captures decode steps, unless told not to or where nothing can be captured."""
        if self.device.type != "cuda" or self.config.enforce_eager:
            return
        block_size, pool = self.config.tokens_per_block, self.memory.pool
        needed = -(-longest(self.config, self.model_config) // block_size)
        try:
            graphs = DecodeGraphs(
                self.model,
                self.memory.backend,
                self.last_drawn,
                max_seqs=self.config.max_num_seqs,
                max_blocks=min(needed, pool.layout.num_blocks - 1),
                block_size=block_size,
                device=self.device,
            )
        except NotImplementedError as error:
            logger.warning(
                "decode runs without CUDA graphs, which is slower: %s", error
            )
            return
        fix = "lower --gpu-memory-utilization or --max-num-seqs, or use --enforce-eager"
        prompt_graphs = PromptGraphs(
            self.model,
            self.memory.backend,
            max_tokens=self.config.max_num_batched_tokens,
            device=self.device,
        )
        with fitting("what CUDA graphs need", self.device, fix):
            graphs.capture()
            prompt_graphs.capture()
        self.graphs, self.prompt_graphs = graphs, prompt_graphs

    @property
    def depth(self) -> int:
        """Steps that may be under way when another is launched: on a CPU there is nothing that
        the work between two steps could hide behind."""
        return 1 if self.device.type == "cuda" else 0

    def execute(self, step: StepInput) -> StepOutput:
        """A step, from its arrays to the drawn tokens."""
        return self.launch(step).result()

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
                torch.cuda.synchronize(
                    self.device
                )  # raises where it is the device that failed
                torch.cuda.empty_cache()
            self.stepping.launched(lambda: True)
            raise StepFailed(f"{type(error).__name__}: {error}") from error

    def _begin(self, step: StepInput) -> LaunchedStep:
        if self.device.type == "cpu":
            self.memory.pool.mark_used(int(step.block_tables.max()))
        if len(step.sample_rows) == 0:
            rows = (
                None if step.scores else np.zeros(1, np.int64)
            )  # all that is wanted is its KV
            scores = score(
                self.model, self.forward(self.memory, step, rows), step.scores
            )
            return LaunchedStep(None, [], self.device, scores)
        # Uploads come before the step, whose launch they might wait for.
        shaping = self.shaper.prepare(step.shapes)
        batch = None
        if shaping is not None or step.is_masked or not is_greedy(step.sampling):
            positions = step.context_lens[step.sample_rows].tolist()
            batch = SamplingBatch.from_params(step.sampling, positions, self.device)
        computed = self.compute(step)
        draw, drawn = None, None
        if step.is_masked and self.model.parallel.rank == 0:
            draw = partial(self._draw_masked, computed, batch, shaping)
        elif (
            step.is_masked
        ):  # rank 0 alone learns the masks; the others take what it draws
            zeros = torch.zeros(
                len(step.sampling), dtype=torch.int64, device=self.device
            )
            drawn = self._shared(SampledTokens(zeros))
        else:
            drawn = self._draw(computed, batch, shaping)
        return LaunchedStep(drawn, step.sampling, self.device, computed.scores, draw)

    def _draw(
        self,
        computed: DecodeOutput,
        batch: SamplingBatch | None,
        shaping: Shaping | None,
    ) -> SampledTokens:
        """Without a batch, the likeliest tokens."""
        if batch is not None:
            return self._shared(sample(computed.logits, batch, shaping))
        token_ids = computed.greedy_ids
        if token_ids is None:
            token_ids = greedy(computed.raw_logits)
        self.last_drawn.keep(token_ids)
        return SampledTokens(token_ids)

    @torch.inference_mode()
    def _draw_masked(
        self,
        computed: DecodeOutput,
        batch: SamplingBatch | None,
        shaping: Shaping | None,
        masks: Int32s,
    ) -> SampledTokens:
        with self._failing_alone():
            return self._draw(computed, batch, self.shaper.masked(shaping, masks))

    def _shared(self, drawn: SampledTokens) -> SampledTokens:
        """Where steps are launched ahead, every rank feeds the next one what rank 0 drew."""
        if self.depth:
            self.model.parallel.broadcast(drawn.token_ids)
        self.last_drawn.keep(drawn.token_ids)
        return drawn

    def compute(self, step: StepInput) -> DecodeOutput:
        """Runs the step up to the logits of the R rows that draw."""
        if self.graphs is not None and self.graphs.can_run(step):
            return self.graphs.run(step)
        if not step.scores:
            hidden = self.forward(self.memory, step, step.last_token_rows)
            return DecodeOutput(self.model.raw_logits(hidden), None)
        hidden = self.forward(self.memory, step)
        logits = self.model.raw_logits(
            hidden[to_device(step.last_token_rows, self.device)]
        )
        return DecodeOutput(logits, None, score(self.model, hidden, step.scores))

    def forward(
        self, memory: RankMemory, step: StepInput, rows: Int64s | None = None
    ) -> torch.Tensor:
        """Hidden states of all tokens of the step, or of those `rows` only."""
        memory.backend.plan(
            step.attention_batch(self.config.tokens_per_block, self.groups.count)
        )
        complements = to_device(
            self.last_drawn.complements(step.token_ids), self.device
        )
        token_ids = self.last_drawn.fill_in(complements)
        positions = to_device(step.positions, self.device)
        wanted = None if rows is None else to_device(rows, self.device)
        graphs = self.prompt_graphs
        if (
            graphs is not None
            and memory is self.memory
            and graphs.takes(len(token_ids))
        ):
            hidden = graphs.run(token_ids, positions)
            return hidden if wanted is None else hidden[wanted]
        return self.model.forward(token_ids, positions, memory.backend, wanted)
