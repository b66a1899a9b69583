"""Models on a GPU: FlashInfer equals torch attention, CUDA graphs equal eager steps,
and a step that runs out of memory can be repeated.

One GPU is needed. The tests use small trained models if there are any, otherwise small
models with dummy weights.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.core.batch import StepFailed, StepInput
from engine.core.logits_processing import NO_ROW, LogitChanges, SamplingRow
from engine.worker.memory import MemoryTooSmall, explaining_oom, size_pool
from engine.worker.runner import ModelRunner
from engine.worker.warm_up import kv_budget_bytes
from model.config import load_config
from model.parallel import Parallel
from protocol.messages import SamplingParams
from tests.gpu.models import supported_model_dir
from tests.make_models import trained_models

pytestmark = pytest.mark.gpu

MODELS = trained_models()
# Models with a head_dim that the kernels support.
SUPPORTED_MODELS = [name for name in MODELS if "stories" not in name]
LOGIT_TOLERANCE = 0.35  # bfloat16, logits up to 30
GREEDY = SamplingParams(temperature=0.0)
RESTRICTED_SAMPLING = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=5
)
PROMPTS = [list(range(5, 5 + n)) for n in (70, 3, 33, 130, 1)]
NUM_BLOCKS = 512  # number of blocks in a pool


def config_for(folder: Path, **options: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "device": "cuda",
        "devices": [0],
        "dtype": "bfloat16",
        "max_num_seqs": 8,
        "block_size": 16,
        **options,
    }
    return EngineConfig(
        role="decode",
        engine_id="test",
        incarnation="0",
        model_dir=str(folder),
        **fields,
    )


@contextmanager
def runner_for(
    folder: Path,
    *,
    num_blocks: int = NUM_BLOCKS,
    captured_layers: tuple[int, ...] = (),
    **options: Any,
) -> Iterator[ModelRunner]:
    runner = ModelRunner(
        config_for(folder, **options), load_config(folder), Parallel(0, 1)
    )
    runner.captured_layers = captured_layers
    runner.allocate(num_blocks)
    runner.capture_graphs()
    yield runner
    del runner
    torch.cuda.empty_cache()


def tables_for(num_tokens: int, num_groups: int = 1) -> np.ndarray:
    width = -(-num_tokens // 16) * num_groups
    order = (
        1 + np.random.default_rng(3).permutation(NUM_BLOCKS - 1)[: width * len(PROMPTS)]
    )
    return order.astype(np.int32).reshape(len(PROMPTS), width)


def step_of(
    parts: Sequence[Sequence[int]],
    context_lens: Sequence[int],
    sampling: SamplingParams = GREEDY,
    num_groups: int = 1,
    **fields: Any,
) -> StepInput:
    """Returns a step of the first len(parts) sequences of PROMPTS. Each sequence
    samples a token.

    Args:
        parts: The tokens of each sequence in this step.
    """
    return StepInput(
        token_ids=np.concatenate([np.array(part, np.int64) for part in parts]),
        query_lens=np.array([len(part) for part in parts], np.int32),
        context_lens=np.array(context_lens, np.int32),
        block_tables=tables_for(160, num_groups)[: len(parts)],
        sampled_sequences=np.arange(len(parts), dtype=np.int32),
        sampling=[sampling] * len(parts),
        **fields,
    )


def step_at(
    index: int, parts: list[list[int]], sampling: SamplingParams, **fields: Any
) -> StepInput:
    """Returns step `index` of the continuation of PROMPTS.

    Step 0 computes the prompts. Later steps compute `parts`.
    """
    context_lens = [len(prompt) + index for prompt in PROMPTS]
    return step_of(parts if index else PROMPTS, context_lens, sampling, **fields)


# Placeholders for tokens that the previous step, still in flight, will sample.
SAMPLED_BEFORE = [[-1 - row] for row in range(len(PROMPTS))]


@torch.inference_mode()
def decode(
    runner: ModelRunner,
    num_steps: int,
    forced: list[list[int]] | None = None,
    sampling: SamplingParams = GREEDY,
) -> tuple[list[list[int]], torch.Tensor]:
    """Continues PROMPTS.

    Args:
        forced: Tokens [step][sequence] that replace the sampled ones as input of the
            next step.

    Returns:
        Tokens [step][sequence] and logits [step, sequence, vocab].
    """
    tokens: list[list[int]] = []
    all_logits = []
    for index in range(num_steps):
        parts = [[token] for token in (forced or tokens)[index - 1]] if index else []
        step = step_at(index, parts, sampling, num_groups=runner.groups.count)
        tokens.append(runner.execute(step).token_ids)
        all_logits.append(runner.compute(step).logits.clone())
    return tokens, torch.stack(all_logits)


def assert_same_but_for_ties(
    tokens: list[list[int]], logits: torch.Tensor, expected: torch.Tensor
) -> None:
    """Asserts that logits are close, and that each token has the best expected logit.

    A different token is allowed if the second-best logit is nearly as good.
    """
    torch.testing.assert_close(logits, expected, atol=LOGIT_TOLERANCE, rtol=0.02)
    best = expected.topk(2).values
    is_clear = best[..., 0] - best[..., 1] > 2 * LOGIT_TOLERANCE
    sampled = torch.tensor(tokens, device=expected.device)
    assert (sampled == expected.argmax(-1))[is_clear].all()
    assert is_clear.float().mean() > 0.3


@pytest.mark.parametrize(
    ("backend", "bits"), [("torch", 16), ("auto", 16), ("torch", 8)], ids=str
)
@pytest.mark.parametrize("name", SUPPORTED_MODELS)
def test_flashinfer_in_graphs_equals_torch_and_eager_steps(name, backend, bits):
    options: dict[str, Any] = {}
    if bits == 8:
        model = load_config(MODELS[name])
        scales = [0.03] * model.kv_components * model.num_layers
        options = {"kv_cache_dtype": "float8_e4m3fn", "scales": scales}
    with runner_for(MODELS[name], **options) as runner:
        assert runner.graphs is not None
        tokens, logits = decode(runner, 24)
    options |= {"attention_backend": backend, "enforce_eager": True}
    with runner_for(MODELS[name], **options) as runner:
        assert runner.graphs is None
        _, expected = decode(runner, 24, forced=tokens)
    assert_same_but_for_ties(tokens, logits, expected)


@pytest.mark.parametrize("name", SUPPORTED_MODELS)
@torch.inference_mode()
def test_prompts_in_graphs_equal_eager_steps(name):
    """Steps mix new and continued prompts of many sizes and a sequence that decodes.

    Rows that a graph adds as padding must not write to blocks of other sequences.
    """
    with runner_for(MODELS[name]) as runner:
        groups = runner.groups.count
        pool = runner.memory.pool
        is_other = torch.ones(512, dtype=torch.bool, device="cuda")
        is_other[torch.from_numpy(tables_for(160, groups)[:3]).long().cuda()] = False
        is_other[0] = False  # the null block
        content = pool.tensor.view(torch.uint8).movedim(pool.layout.order.index("B"), 0)
        graphs = runner.prompt_graphs
        all_logits = []
        assert graphs is not None
        for prompt_graphs in (graphs, None):
            runner.prompt_graphs = prompt_graphs
            torch.manual_seed(0)
            content.random_(0, 60)  # finite numbers in any dtype
            before = content[is_other].clone()
            prompts = [range(5, 35), range(9, 39), [7]]
            runner.execute(step_of(prompts, [30, 30, 1], num_groups=groups))
            for n in (3, 12, 13, 70, 73, 100):
                parts = [range(40, 40 + n), [8], range(90, 90 + n // 3)]
                step = step_of(parts, [30 + n, 31, 1 + n // 3], num_groups=groups)
                all_logits.append(runner.compute(step).logits.clone())
            assert torch.equal(content[is_other], before)
    torch.testing.assert_close(
        all_logits[:6], all_logits[6:], atol=LOGIT_TOLERANCE, rtol=0.02
    )


@pytest.mark.parametrize("name", SUPPORTED_MODELS)
@torch.inference_mode()
def test_states_that_graphs_capture_equal_those_of_eager_steps(name):
    layers = (1, load_config(MODELS[name]).num_layers)
    states = []
    for enforce_eager in (False, True):
        with runner_for(
            MODELS[name], captured_layers=layers, enforce_eager=enforce_eager
        ) as runner:
            for index in range(3):
                parts = [[7 + row] for row in range(len(PROMPTS))]
                step = step_at(index, parts, GREEDY, num_groups=runner.groups.count)
                runner.execute(step)
                assert runner.captured_states is not None
                states.append(runner.captured_states.clone())
    for in_graphs, eager in zip(states[:3], states[3:], strict=True):
        difference = (in_graphs - eager).float().norm()
        assert difference < 0.03 * eager.float().norm()


def continue_ahead(
    runner: ModelRunner, num_steps: int, sampling: SamplingParams
) -> list[list[int]]:
    """Continues PROMPTS. Launches each step before reading the tokens of the previous
    step.

    Returns:
        Tokens [step][sequence].
    """
    tokens = []
    in_flight = []
    for index in range(num_steps):
        in_flight.append(runner.launch(step_at(index, SAMPLED_BEFORE, sampling)))
        if len(in_flight) > runner.depth:
            tokens.append(in_flight.pop(0).result().token_ids)
    return tokens + [step.result().token_ids for step in in_flight]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", SUPPORTED_MODELS)
def test_steps_launched_ahead_sample_the_same_tokens(name, enforce_eager):
    with runner_for(MODELS[name], enforce_eager=enforce_eager) as runner:
        assert runner.depth == 1
        expected, _ = decode(runner, 24)
        assert continue_ahead(runner, 24, GREEDY) == expected
        expected, _ = decode(runner, 12, sampling=RESTRICTED_SAMPLING)
        assert continue_ahead(runner, 12, RESTRICTED_SAMPLING) == expected
        with_logprobs = SamplingParams(temperature=0.8, seed=5, num_logprobs=2)
        tokens = continue_ahead(runner, 12, with_logprobs)
        assert tokens == continue_ahead(runner, 12, with_logprobs)


def masks_of(vocab_size: int, index: int) -> np.ndarray:
    """Returns the token masks of step `index`, one row per sequence of PROMPTS.

    Every second row is random. The remaining rows allow all tokens. The masks are equal
    on every rank.
    """
    words = -(-vocab_size // 32)
    random = np.random.default_rng(index)
    masks = random.integers(-(2**31), 2**31, (len(PROMPTS), words)).astype(np.int32)
    masks[1::2] = -1
    return masks


def continue_masked(
    runner: ModelRunner, num_steps: int, sampling: SamplingParams
) -> list[list[int]]:
    """Continues PROMPTS. Launches each step before its masks are known. Only rank 0
    gets the masks.

    Returns:
        Tokens [step][sequence].
    """
    tokens = []
    in_flight = []
    for index in range(num_steps):
        step = step_at(index, SAMPLED_BEFORE, sampling, is_masked=True)
        in_flight.append(runner.launch(step))
        if len(in_flight) > 1:
            tokens.append(in_flight.pop(0).result().token_ids)
        if runner.model.parallel.rank == 0:
            in_flight[-1].draw(masks_of(runner.model_config.vocab_size, index))
    return tokens + [step.result().token_ids for step in in_flight]


def assert_allowed(tokens: list[list[int]], vocab_size: int) -> None:
    """Asserts that the masks of `masks_of` allow these tokens."""
    for index, step_tokens in enumerate(tokens):
        masks = masks_of(vocab_size, index)
        for row, token in enumerate(step_tokens):
            assert masks[row, token // 32] >> (token % 32) & 1, (index, row, token)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", SUPPORTED_MODELS)
def test_masked_rows_sample_allowed_tokens_and_other_rows_are_unchanged(
    name, enforce_eager
):
    with runner_for(MODELS[name], enforce_eager=enforce_eager) as runner:
        unmasked, _ = decode(runner, 12)
        greedy = continue_masked(runner, 12, GREEDY)
        restricted = continue_masked(runner, 12, RESTRICTED_SAMPLING)
        vocab_size = runner.model_config.vocab_size
        assert_allowed(greedy, vocab_size)
        assert_allowed(restricted, vocab_size)
    assert [step[1::2] for step in greedy] == [step[1::2] for step in unmasked]


_SETUP = SamplingRow(0, [1, 2, 3], [3], (0.5, 0.7, 1.3), {9: 4.0}, [5, 6])
_ROWS = [0, *[NO_ROW] * (len(PROMPTS) - 1)]
_BANS = [True, *[False] * (len(PROMPTS) - 1)]


@pytest.mark.parametrize(
    ("sampling", "shaped", "masked"),
    [
        pytest.param(GREEDY, False, False, id="greedy"),
        pytest.param(RESTRICTED_SAMPLING, False, False, id="restricted"),
        pytest.param(
            replace(RESTRICTED_SAMPLING, num_logprobs=3), False, False, id="logprobs"
        ),
        pytest.param(RESTRICTED_SAMPLING, True, False, id="penalties, bias and bans"),
        pytest.param(GREEDY, True, True, id="masks"),
    ],
)
def test_launching_a_decode_step_does_not_wait_for_the_gpu(sampling, shaped, masked):
    def step(index: int) -> StepInput:
        parts = SAMPLED_BEFORE
        if index == 0:
            parts = [[token] for token in range(len(PROMPTS))]
        changes = None
        if shaped:
            changes = LogitChanges(_ROWS, _BANS, [] if index else [_SETUP])
        context_lens = [40 + index] * len(PROMPTS)
        return step_of(
            parts, context_lens, sampling, logit_changes=changes, is_masked=masked
        )

    with runner_for(supported_model_dir("gqa4")) as runner:
        words = -(-runner.model_config.vocab_size // 32)
        masks = np.full((len(PROMPTS), words), 0x5F5F5F5F, np.int32)
        in_flight = []
        for index in range(6):
            # The first three steps may wait for the GPU, because they compile kernels.
            # Later steps must not.
            mode = "error" if index > 2 else "default"
            torch.cuda.set_sync_debug_mode(mode)
            try:
                in_flight.append(runner.launch(step(index)))
                if masked:
                    in_flight[-1].draw(masks)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            if len(in_flight) > 1:
                token_ids = in_flight.pop(0).result().token_ids
                assert len(token_ids) == len(PROMPTS)


@contextmanager
def no_memory() -> Iterator[None]:
    """Allocates all GPU memory that this process may have, for the time of the `with`
    block.
    """
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + (8 << 20)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    allocated = []
    for size in (1 << 20, 1 << 14, 512):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
                allocated.append(tensor)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_step_that_ran_out_of_memory_can_be_repeated():
    with runner_for(supported_model_dir("gqa4")) as runner:
        first = step_of(PROMPTS[:1], [70])
        expected = runner.execute(first).token_ids
        expected += runner.execute(step_of([expected], [71])).token_ids
        in_flight = runner.launch(first)
        with no_memory(), pytest.raises(StepFailed, match="OutOfMemoryError"):
            runner.launch(step_of([PROMPTS[3]], [130]))
        # The step that was launched before the memory ran out is not affected.
        first_ids = in_flight.result().token_ids
        second_ids = runner.execute(step_of([first_ids], [71])).token_ids
        assert first_ids + second_ids == expected


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_sampling_under_masks_can_be_repeated_after_it_ran_out_of_memory(enforce_eager):
    with runner_for(supported_model_dir("gqa4"), enforce_eager=enforce_eager) as runner:
        masks = np.full((1, -(-runner.model_config.vocab_size // 32)), -1, np.int32)
        first_ids = runner.execute(step_of(PROMPTS[:1], [70])).token_ids
        expected = runner.execute(step_of([first_ids], [71])).token_ids
        step = step_of([first_ids], [71], is_masked=True)
        in_flight = runner.launch(step)
        with no_memory(), pytest.raises(StepFailed, match="OutOfMemoryError"):
            in_flight.draw(masks)
        repeated = runner.launch(step)
        repeated.draw(masks)
        assert repeated.result().token_ids == expected


@pytest.mark.parametrize("name", sorted(MODELS))
def test_float32_on_the_gpu_equals_the_cpu(name):
    options = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True}
    with runner_for(MODELS[name], **options) as runner:
        tokens, logits = decode(runner, 8)
    with runner_for(MODELS[name], **options, device="cpu") as runner:
        expected_tokens, expected = decode(runner, 8)
    assert tokens == expected_tokens
    torch.testing.assert_close(logits.cpu(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.alone  # tests in other processes would change the GPU's free memory
@pytest.mark.parametrize("name", SUPPORTED_MODELS[:1])
def test_pool_is_sized_by_the_free_memory(name):
    with runner_for(MODELS[name], gpu_memory_utilization=0.5) as runner:
        total = torch.cuda.get_device_properties(0).total_memory
        budget = kv_budget_bytes(runner)
        assert 0.2 * total < budget < 0.5 * total
        block_bytes = runner.layout(2).block_bytes
        size = size_pool(
            runner.config, block_bytes=block_bytes, model_max_len=512, free_bytes=budget
        )
        assert size.num_blocks == budget // block_bytes


def test_memory_error_names_the_missing_bytes():

    with pytest.raises(
        MemoryTooSmall, match=r"an allocation of 1024.00 GiB failed with .* GiB; use"
    ):
        with explaining_oom("a whole", torch.device("cuda", 0), "use a half"):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
