"""One rank's model, KV pool and attention: turns a StepInput into drawn tokens.

The runner has no notion of requests, queues or peers. When the result of a launched
step is available, all reads and writes of KV by the step have finished. Invariant I8 of
docs/design.md depends on this. `LaunchedStep.result` therefore waits for the end of the
step on the device, even if the step draws nothing.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

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
from engine.worker.cuda_graph import DecodeGraphs, LogitsOutput, PromptGraphs
from engine.worker.load import LoadModel, compiling_kernels, load, open_device
from engine.worker.memory import (
    RankMemory,
    explaining_oom,
    make_memory,
    max_sequence_tokens,
)
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.step_watch import StepWatch
from model.config import ModelConfig
from model.parallel import Parallel
from protocol.messages import SamplingParams, TokenLogprobs

logger = logging.getLogger("baton.engine")

StoreStates = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class LaunchedStep:
    """Implements batch.PendingStep. The drawn tokens are copied to the host without
    waiting for the device.

    Args:
        drawn: the drawn tokens; None if the step draws nothing, or has not drawn yet.
        params: sampling parameters of each draw.
        scores: the logprobs of prompt tokens.
        draw: on rank 0, draws the tokens of a step with grammar masks, given these
            masks; None for all other steps.
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
        self._end_event: Any = None
        if draw is None:
            self._start_copy(drawn)

    def draw(self, masks: Int32s) -> None:
        assert self._draw is not None, "the step has no masks"
        self._start_copy(self._draw(masks))
        self._draw = None

    def _start_copy(self, drawn: SampledTokens | None) -> None:
        """Starts to copy the drawn tokens to the host, and marks the end of the step on
        the device."""
        if drawn is not None:
            self._drawn = SampledTokens(
                drawn.token_ids.to("cpu", non_blocking=True),
                drawn.logprobs and drawn.logprobs.on_host(),
            )
        if self._device.type == "cuda":
            new_event: Any = torch.cuda.Event
            self._end_event = new_event()
            self._end_event.record(torch.cuda.current_stream(self._device))

    def has_ended(self) -> bool:
        """Whether the device has finished the step. May be called from any thread. On a
        CPU it has, because the launch itself computes the step."""
        if self._device.type != "cuda":
            return True
        return self._end_event is not None and bool(self._end_event.query())

    def result(self) -> StepOutput:
        assert self._draw is None, "the tokens of a masked step must be drawn first"
        if self._end_event is not None:
            self._end_event.synchronize()
        scores = self._scores.result()
        if self._drawn is None:
            return StepOutput([], [], scores)
        token_ids: list[int] = self._drawn.token_ids.tolist()
        if self._drawn.logprobs is None:
            return StepOutput(token_ids, [None] * len(token_ids), scores)
        counts = [params.num_logprobs for params in self._params]
        rows = self._drawn.logprobs.rows([count or 0 for count in counts])
        logprobs: list[TokenLogprobs | None] = [
            None if count is None else row
            for row, count in zip(rows, counts, strict=True)
        ]
        return StepOutput(token_ids, logprobs, scores)


class ModelRunner:
    """The model of one rank. The constructor loads the weights; `allocate` makes the KV
    pool afterwards.

    Args:
        report: called with descriptions of the progress.
        device: the rank's device, if another runner of this process has opened it;
            None: the constructor opens it.
        load_weights: loads the model to the device.

    Attributes:
        draft: the draft model of this rank; None if there is none.
        memory: the KV pool and the attention backend; set by `allocate`.
        last_drawn: the tokens that the last launched step draws.
        step_watch: shows the transfer thread whether this rank is computing.
        captured_layers: the layers whose hidden states a drafter needs; see
            StateCapture. Must be set before `capture_graphs`, and before the memory of
            steps is measured.
        captured_states: the hidden states of `captured_layers` for each token of the
            last launched step, valid until the next launch; None if `captured_layers`
            is empty.
        store_states: a function that stores hidden states of a step for a drafter. Its
            arguments are the captured states, the rows of the step to store, and a slot
            for each row. None if no drafter reads hidden states.
    """

    memory: RankMemory

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        parallel: Parallel,
        report: Callable[[str], None] = lambda text: None,
        device: torch.device | None = None,
        load_weights: LoadModel = load,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.groups, _ = kv_groups(model_config)
        self.device = device or open_device(config, parallel.rank)
        vocab_size = model_config.vocab_size
        # The warm-up needs a state row for each draw of a step. Requests need fewer
        # rows: one for each sequence.
        self.shaper = LogitShaper(vocab_size, config.max_step_rows, self.device)
        with compiling_kernels(config, model_config, self.device, report):
            self.model = load_weights(
                config, model_config, parallel, self.device, report
            )
        self.last_drawn = LastSampledTokens(
            config.max_step_rows, vocab_size, self.device
        )
        self.step_watch = StepWatch()
        self.draft: ModelRunner | None = None
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.captured_layers: tuple[int, ...] = ()
        self.captured_states: torch.Tensor | None = None
        self.store_states: StoreStates | None = None

    def layout(self, num_blocks: int) -> KVLayout:
        """The layout of this rank's pool with `num_blocks` blocks, including the null
        block."""
        return layout_of(self.config, self.model_config, num_blocks)

    def allocate(
        self,
        num_blocks: int,
        *,
        extra_bytes: int = 0,
        pool_memory: torch.Tensor | None = None,
    ) -> RankMemory:
        """Makes the KV pool and its attention backend, and stores them in `memory`.

        Args:
            extra_bytes: as in KVPool.
            pool_memory: the argument `memory` of KVPool.
        """
        fix = (
            "another process may have taken the memory during the start: lower "
            "--gpu-memory-utilization"
        )
        with explaining_oom(f"a KV pool of {num_blocks} blocks", self.device, fix):
            self.memory = self.make_memory(
                num_blocks, extra_bytes=extra_bytes, pool_memory=pool_memory
            )
        workspace_bytes = self.memory.backend.workspace_bytes
        if workspace_bytes:
            logger.info(
                "attention: %.0f MiB in addition to the KV pool per rank",
                workspace_bytes / 2**20,
            )
        return self.memory

    def make_memory(
        self,
        num_blocks: int,
        *,
        extra_bytes: int = 0,
        pool_memory: torch.Tensor | None = None,
    ) -> RankMemory:
        """Makes a KV pool and its attention backend, without changing `memory`. For the
        arguments see `allocate`."""
        # With several KV groups, all scales are 1 (check_scales in engine/geometry.py).
        scales = self.config.scales if self.groups.count == 1 else ()
        pool = KVPool(
            self.layout(num_blocks),
            self.device,
            scales,
            self.groups,
            extra_bytes=extra_bytes,
            memory=pool_memory,
        )
        return make_memory(self.config, self.model_config, self.model, pool)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Captures decode steps and small prompt steps as CUDA graphs. Does nothing
        with --enforce-eager, or if the device or the attention backend does not support
        graphs.
        """
        if self.device.type != "cuda" or self.config.enforce_eager:
            return
        block_size = self.config.tokens_per_block
        num_blocks = self.memory.pool.layout.num_blocks
        max_tokens = max_sequence_tokens(self.config, self.model_config)
        try:
            graphs = DecodeGraphs(
                self.model,
                self.memory.backend,
                self.last_drawn,
                max_seqs=self.config.max_step_rows,
                max_blocks=min(-(-max_tokens // block_size), num_blocks - 1),
                block_size=block_size,
                device=self.device,
                captured_layers=self.captured_layers,
            )
        except NotImplementedError as error:
            logger.warning(
                "all steps run without CUDA graphs, which is slower: %s", error
            )
            return
        prompt_graphs = PromptGraphs(
            self.model,
            self.memory.backend,
            max_tokens=self.config.max_num_batched_tokens,
            device=self.device,
            captured_layers=self.captured_layers,
        )
        fix = "lower --gpu-memory-utilization or --max-num-seqs, or use --enforce-eager"
        with explaining_oom("the memory of CUDA graphs", self.device, fix):
            graphs.capture()
            prompt_graphs.capture()
        self.graphs = graphs
        self.prompt_graphs = prompt_graphs

    @property
    def captured_prompt_tokens(self) -> int:
        """The largest number of tokens of a step with prompts that runs as CUDA graphs;
        0 if no such step does."""
        return self.prompt_graphs.max_tokens if self.prompt_graphs is not None else 0

    @property
    def depth(self) -> int:
        """How many launched steps may be unfinished when the next step is launched. On
        a CPU this is 0, because the launch itself computes the step.
        """
        return 1 if self.device.type == "cuda" else 0

    def execute(self, step: StepInput) -> StepOutput:
        """Launches a step and waits for its result."""
        return self.launch(step).result()

    @torch.inference_mode()
    def launch(self, step: StepInput) -> PendingStep:
        """Launches a step, which computes its tokens, writes their KV, and draws the
        next tokens. Results must be taken in the order of the launches.

        Raises:
            StepFailed: the step was launched only in part or not at all, and may be
                launched again.
        """
        self.step_watch.launching()
        with self._raising_step_failed():
            if len(step.stored_rows):
                pending = self._launch_and_store(step)
            else:
                pending = self._launch_step(step)
            self.step_watch.launched(pending.has_ended)
        return pending

    def _launch_and_store(self, step: StepInput) -> LaunchedStep:
        """Launches a step, and stores the hidden states that a drafter needs later."""
        # Upload before the launch, because a later upload might wait for the step.
        rows = to_device(step.stored_rows.astype(np.int64), self.device)
        slots = to_device(step.stored_slots.astype(np.int64), self.device)
        pending = self._launch_step(step)
        assert self.store_states is not None, "no drafter reads states"
        assert self.captured_states is not None
        self.store_states(self.captured_states, rows, slots)
        return pending

    @contextmanager
    def _raising_step_failed(self) -> Iterator[None]:
        """Converts errors to StepFailed if the device still works and no other rank
        takes part in the step."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            if self.model.parallel.size > 1:
                raise  # the other ranks have begun the step
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # raises if the device has failed
                torch.cuda.empty_cache()
            self.step_watch.launched(lambda: True)
            raise StepFailed(f"{type(error).__name__}: {error}") from error

    def _launch_step(self, step: StepInput) -> LaunchedStep:
        if self.device.type == "cpu":
            self.memory.pool.mark_used(int(step.block_tables.max()))
        if len(step.sampled_sequences) == 0:
            return self._launch_without_draws(step)
        # Upload before the launch of the step, because a later upload might wait for
        # the step.
        shaping = self.shaper.prepare(step.logit_changes)
        batch = None
        if shaping is not None or step.is_masked or not is_greedy(step.sampling):
            batch = SamplingBatch.from_params(
                step.sampling, step.num_before_draws, self.device
            )
        computed = self.compute(step)
        drawn: SampledTokens | None = None
        draw: Callable[[Int32s], SampledTokens] | None = None
        if not step.is_masked:
            drawn = self._draw(computed, batch, shaping)
        elif self.model.parallel.rank == 0:
            draw = partial(self._draw_masked, computed, batch, shaping)
        else:
            # Only rank 0 has the masks; the other ranks receive the tokens that rank 0
            # draws.
            zeros = torch.zeros(
                len(step.sampling), dtype=torch.int64, device=self.device
            )
            drawn = self._share_draws(SampledTokens(zeros))
        return LaunchedStep(drawn, step.sampling, self.device, computed.scores, draw)

    def _launch_without_draws(self, step: StepInput) -> LaunchedStep:
        # Without scores only the KV is needed, so one row of hidden states suffices.
        rows = None if step.scores else np.zeros(1, np.int64)
        hidden = self.forward(self.memory, step, rows)
        scores = score(self.model, hidden, step.scores)
        return LaunchedStep(None, [], self.device, scores)

    def _draw(
        self,
        computed: LogitsOutput,
        batch: SamplingBatch | None,
        shaping: Shaping | None,
    ) -> SampledTokens:
        """Draws a token for each row; if `batch` is None, the likeliest token."""
        if batch is not None:
            return self._share_draws(sample(computed.logits, batch, shaping))
        token_ids = computed.greedy_ids
        if token_ids is None:
            token_ids = greedy(computed.raw_logits)
        self.last_drawn.store(token_ids)
        return SampledTokens(token_ids)

    @torch.inference_mode()
    def _draw_masked(
        self,
        computed: LogitsOutput,
        batch: SamplingBatch | None,
        shaping: Shaping | None,
        masks: Int32s,
    ) -> SampledTokens:
        with self._raising_step_failed():
            return self._draw(computed, batch, self.shaper.masked(shaping, masks))

    def _share_draws(self, drawn: SampledTokens) -> SampledTokens:
        """Stores the draws for the next step. If steps are launched ahead, every rank
        reads the next step's tokens from its own device, so the draws of rank 0 replace
        those of the other ranks."""
        if self.depth:
            self.model.parallel.broadcast(drawn.token_ids)
        self.last_drawn.store(drawn.token_ids)
        return drawn

    def compute(self, step: StepInput) -> LogitsOutput:
        """Runs the step up to the logits of the R rows that draw."""
        if self.graphs is not None and self.graphs.can_run(step):
            output = self.graphs.run(step)
            self.captured_states = output.states
            return output
        if not step.scores:
            hidden = self.forward(self.memory, step, step.last_token_rows)
            logits = self.model.raw_logits(hidden)
            return LogitsOutput(logits, None, states=self.captured_states)
        hidden = self.forward(self.memory, step)
        rows = to_device(step.last_token_rows, self.device)
        logits = self.model.raw_logits(hidden[rows])
        scores = score(self.model, hidden, step.scores)
        return LogitsOutput(logits, None, scores, self.captured_states)

    def forward(
        self, memory: RankMemory, step: StepInput, rows: Int64s | None = None
    ) -> torch.Tensor:
        """Plans the attention of a step and runs the model. Stores the hidden states
        that a drafter needs in `captured_states`.

        Returns the hidden states of all T tokens of the step, or those of `rows` [R].
        """
        memory.backend.plan(
            step.attention_batch(self.config.tokens_per_block, self.groups.count)
        )
        complements = to_device(
            self.last_drawn.complements(step.token_ids), self.device
        )
        token_ids = self.last_drawn.resolve(complements)
        positions = to_device(step.rotary_positions, self.device)
        device_rows = None if rows is None else to_device(rows, self.device)
        capture = self.model.new_capture(self.captured_layers, len(token_ids))
        self.captured_states = capture and capture.out
        graphs = self.prompt_graphs
        if (
            graphs is not None
            and memory is self.memory
            and graphs.can_run(len(token_ids))
        ):
            hidden = graphs.run(token_ids, positions, capture)
            return hidden if device_rows is None else hidden[device_rows]
        return self.model.forward(
            token_ids, positions, memory.backend, device_rows, capture
        )
