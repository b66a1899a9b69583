"""Models on a GPU: flashinfer equals torch, graphs equal eager, and the refusals at start.

One GPU; the small trained models where they are found, else dummy weights of small shapes.
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
from engine.core.logits_processing import NO_ROW, SamplingRow, StepShapes
from engine.worker.memory import MemoryTooSmall, fitting, size_pool
from engine.worker.rehearsal import kv_budget_bytes
from engine.worker.runner import ModelRunner
from model.config import load_config
from model.parallel import Parallel
from protocol.messages import SamplingParams
from tests.make_models import trained_models

pytestmark = pytest.mark.gpu

MODELS = trained_models()
SERVED = [
    name for name in MODELS if "stories" not in name
]  # whose head_dim the kernels have
LOGIT_TOLERANCE = 0.35  # bfloat16, logits up to 30
GREEDY = SamplingParams(temperature=0.0)
RESTRICTED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=5)
PROMPTS = [list(range(5, 5 + n)) for n in (70, 3, 33, 130, 1)]
BLOCKS = 512  # of a pool


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
    folder: Path, *, num_blocks: int = BLOCKS, **options: Any
) -> Iterator[ModelRunner]:
    runner = ModelRunner(
        config_for(folder, **options), load_config(folder), Parallel(0, 1)
    )
    runner.allocate(num_blocks)
    runner.capture_graphs()
    yield runner
    del runner
    torch.cuda.empty_cache()


def tables_for(num_tokens: int, num_groups: int = 1) -> np.ndarray:
    width = -(-num_tokens // 16) * num_groups
    order = 1 + np.random.default_rng(3).permutation(BLOCKS - 1)[: width * len(PROMPTS)]
    return order.astype(np.int32).reshape(len(PROMPTS), width)


def step_of(
    parts: Sequence[Sequence[int]],
    context_lens: Sequence[int],
    sampling: SamplingParams = GREEDY,
    num_groups: int = 1,
    **members: Any,
) -> StepInput:
    """The tokens of so many of PROMPTS' sequences, each of which draws."""
    return StepInput(
        token_ids=np.concatenate([np.array(part, np.int64) for part in parts]),
        query_lens=np.array([len(part) for part in parts], np.int32),
        context_lens=np.array(context_lens, np.int32),
        block_tables=tables_for(160, num_groups)[: len(parts)],
        sample_rows=np.arange(len(parts), dtype=np.int32),
        sampling=[sampling] * len(parts),
        **members,
    )


def step_at(
    index: int, parts: list[list[int]], sampling: SamplingParams, **members: Any
) -> StepInput:
    """Step `index` of PROMPTS' continuation; the first one computes the prompts, else `parts`."""
    context_lens = [len(prompt) + index for prompt in PROMPTS]
    return step_of(parts if index else PROMPTS, context_lens, sampling, **members)


DRAWN_BEFORE = [
    [-1 - row] for row in range(len(PROMPTS))
]  # by the step before, which is under way


@torch.inference_mode()
def decode(
    runner: ModelRunner,
    num_steps: int,
    forced: list[list[int]] | None = None,
    sampling: SamplingParams = GREEDY,
) -> tuple[list[list[int]], torch.Tensor]:
    """Continuation of PROMPTS: tokens [step][sequence], logits [step, sequence, vocab]."""
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
    torch.testing.assert_close(logits, expected, atol=LOGIT_TOLERANCE, rtol=0.02)
    best = expected.topk(2).values
    is_clear = best[..., 0] - best[..., 1] > 2 * LOGIT_TOLERANCE
    drawn = torch.tensor(tokens, device=expected.device)
    assert (drawn == expected.argmax(-1))[is_clear].all()
    assert is_clear.float().mean() > 0.3


@pytest.mark.parametrize(
    ("backend", "bits"), [("torch", 16), ("auto", 16), ("torch", 8)], ids=str
)
@pytest.mark.parametrize("name", SERVED)
def test_graphs_of_flashinfer_continue_like_torch_and_like_eager_steps(
    name, backend, bits
):
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


@pytest.mark.parametrize("name", SERVED)
@torch.inference_mode()
def test_prompts_between_graphs_are_those_of_eager_steps(name):
    """New and continued ones of any size, beside a sequence that decodes; nobody else's block is
    written by rows that a graph adds."""
    with runner_for(MODELS[name]) as runner:
        groups, pool = runner.groups.count, runner.memory.pool
        others = torch.ones(512, dtype=torch.bool, device="cuda")
        others[torch.from_numpy(tables_for(160, groups)[:3]).long().cuda()] = False
        others[0] = False  # nobody's
        content = pool.tensor.view(torch.uint8).movedim(pool.layout.order.index("B"), 0)
        graphs, found = runner.prompt_graphs, []
        assert graphs is not None
        for way in (graphs, None):
            runner.prompt_graphs = way
            torch.manual_seed(0)
            content.random_(0, 60)  # numbers, in any dtype
            before = content[others].clone()
            prompts = [range(5, 35), range(9, 39), [7]]
            runner.execute(step_of(prompts, [30, 30, 1], num_groups=groups))
            for n in (3, 12, 13, 70, 73, 100):
                parts = [range(40, 40 + n), [8], range(90, 90 + n // 3)]
                step = step_of(parts, [30 + n, 31, 1 + n // 3], num_groups=groups)
                found.append(runner.compute(step).logits.clone())
            assert torch.equal(content[others], before)
    torch.testing.assert_close(found[:6], found[6:], atol=LOGIT_TOLERANCE, rtol=0.02)


def continue_ahead(
    runner: ModelRunner, num_steps: int, sampling: SamplingParams
) -> list[list[int]]:
    """Tokens [step][sequence], each step launched before the last one's are read."""
    tokens, under_way = [], []
    for index in range(num_steps):
        under_way.append(runner.launch(step_at(index, DRAWN_BEFORE, sampling)))
        if len(under_way) > runner.depth:
            tokens.append(under_way.pop(0).result().token_ids)
    return tokens + [step.result().token_ids for step in under_way]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_steps_launched_ahead_draw_what_steps_one_by_one_draw(name, enforce_eager):
    with runner_for(MODELS[name], enforce_eager=enforce_eager) as runner:
        assert runner.depth == 1
        expected, _ = decode(runner, 24)
        assert continue_ahead(runner, 24, GREEDY) == expected
        expected, _ = decode(runner, 12, sampling=RESTRICTED)
        assert continue_ahead(runner, 12, RESTRICTED) == expected
        sampled = SamplingParams(temperature=0.8, seed=5, num_logprobs=2)
        assert continue_ahead(runner, 12, sampled) == continue_ahead(
            runner, 12, sampled
        )


def masks_of(vocab_size: int, index: int) -> np.ndarray:
    """Random ones for every other of PROMPTS, the same on every rank; the rest are free."""
    words = -(-vocab_size // 32)
    random = np.random.default_rng(index)
    masks = random.integers(-(2**31), 2**31, (len(PROMPTS), words)).astype(np.int32)
    masks[1::2] = -1
    return masks


def continue_masked(
    runner: ModelRunner, num_steps: int, sampling: SamplingParams
) -> list[list[int]]:
    """Tokens [step][sequence], each step launched before the masks of the last one's were used for
    the next; only rank 0 learns the masks."""
    tokens, under_way = [], []
    for index in range(num_steps):
        under_way.append(
            runner.launch(step_at(index, DRAWN_BEFORE, sampling, is_masked=True))
        )
        if len(under_way) > 1:
            tokens.append(under_way.pop(0).result().token_ids)
        if runner.model.parallel.rank == 0:
            under_way[-1].draw(masks_of(runner.model_config.vocab_size, index))
    return tokens + [step.result().token_ids for step in under_way]


def assert_allowed(tokens: list[list[int]], vocab_size: int) -> None:
    for index, drawn in enumerate(tokens):
        masks = masks_of(vocab_size, index)
        for row, token in enumerate(drawn):
            assert masks[row, token // 32] >> (token % 32) & 1, (index, row, token)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_masked_rows_draw_what_is_allowed_and_free_rows_as_ever(name, enforce_eager):
    with runner_for(MODELS[name], enforce_eager=enforce_eager) as runner:
        free, _ = decode(runner, 12)
        tokens = continue_masked(runner, 12, GREEDY)
        drawn = continue_masked(runner, 12, RESTRICTED)
        for each in (tokens, drawn):
            assert_allowed(each, runner.model_config.vocab_size)
    assert [step[1::2] for step in tokens] == [step[1::2] for step in free]


_SETUP = SamplingRow(0, [1, 2, 3], [3], (0.5, 0.7, 1.3), {9: 4.0}, [5, 6])
_ROWS = [0, *[NO_ROW] * (len(PROMPTS) - 1)]
_BANS = [True, *[False] * (len(PROMPTS) - 1)]


@pytest.mark.parametrize(
    ("sampling", "shaped", "masked"),
    [
        pytest.param(GREEDY, False, False, id="greedy"),
        pytest.param(RESTRICTED, False, False, id="restricted"),
        pytest.param(replace(RESTRICTED, num_logprobs=3), False, False, id="logprobs"),
        pytest.param(RESTRICTED, True, False, id="penalties, bias and bans"),
        pytest.param(GREEDY, True, True, id="masks"),
    ],
)
def test_launching_a_decode_step_waits_for_nothing(sampling, shaped, masked):
    def step(index: int) -> StepInput:
        parts = DRAWN_BEFORE if index else [[token] for token in range(len(PROMPTS))]
        shapes = StepShapes(_ROWS, _BANS, [] if index else [_SETUP]) if shaped else None
        context_lens = [40 + index] * len(PROMPTS)
        return step_of(parts, context_lens, sampling, shapes=shapes, is_masked=masked)

    with runner_for(MODELS[SERVED[0]]) as runner:
        words = -(-runner.model_config.vocab_size // 32)
        masks = np.full((len(PROMPTS), words), 0x5F5F5F5F, np.int32)
        under_way = []
        for index in range(6):
            mode = "error" if index > 2 else "default"  # kernels are compiled by then
            torch.cuda.set_sync_debug_mode(mode)
            try:
                under_way.append(runner.launch(step(index)))
                if masked:
                    under_way[-1].draw(masks)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            if len(under_way) > 1:
                assert len(under_way.pop(0).result().token_ids) == len(PROMPTS)


@contextmanager
def no_memory() -> Iterator[None]:
    """The device has none to give."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + (8 << 20)) / total
    )
    taken = []
    for size in (1 << 20, 1 << 14, 512):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_step_that_runs_out_of_memory_can_be_taken_again():
    with runner_for(MODELS[SERVED[0]]) as runner:
        first = step_of(PROMPTS[:1], [70])
        expected = runner.execute(first).token_ids
        expected += runner.execute(step_of([expected], [71])).token_ids
        under_way = runner.launch(first)
        with no_memory(), pytest.raises(StepFailed, match="OutOfMemoryError"):
            runner.launch(step_of([PROMPTS[3]], [130]))
        drawn = under_way.result().token_ids  # what was launched before is as ever
        assert drawn + runner.execute(step_of([drawn], [71])).token_ids == expected


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_masks_that_run_out_of_memory_can_be_drawn_again(enforce_eager):
    with runner_for(MODELS[SERVED[0]], enforce_eager=enforce_eager) as runner:
        masks = np.full((1, -(-runner.model_config.vocab_size // 32)), -1, np.int32)
        drawn = runner.execute(step_of(PROMPTS[:1], [70])).token_ids
        expected = runner.execute(step_of([drawn], [71])).token_ids
        step = step_of([drawn], [71], is_masked=True)
        under_way = runner.launch(step)
        with no_memory(), pytest.raises(StepFailed, match="OutOfMemoryError"):
            under_way.draw(masks)
        again = runner.launch(step)
        again.draw(masks)
        assert again.result().token_ids == expected


@pytest.mark.parametrize("name", sorted(MODELS))
def test_float32_on_the_gpu_equals_the_cpu(name):
    options = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True}
    with runner_for(MODELS[name], **options) as runner:
        tokens, logits = decode(runner, 8)
    with runner_for(MODELS[name], **options, device="cpu") as runner:
        expected_tokens, expected = decode(runner, 8)
    assert tokens == expected_tokens
    torch.testing.assert_close(logits.cpu(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.alone  # others' memory is not free
@pytest.mark.parametrize("name", SERVED[:1])
def test_the_pool_is_sized_from_what_is_free(name):
    with runner_for(MODELS[name], gpu_memory_utilization=0.5) as runner:
        total = torch.cuda.get_device_properties(0).total_memory
        budget = kv_budget_bytes(runner)
        assert 0.2 * total < budget < 0.5 * total
        block_bytes = runner.layout(2).block_bytes
        size = size_pool(
            runner.config, block_bytes=block_bytes, model_max_len=512, free_bytes=budget
        )
        assert size.num_blocks == budget // block_bytes


def test_what_does_not_fit_says_how_much_is_missing():
    with pytest.raises(
        MemoryTooSmall, match=r"GiB were left when 1024.00 GiB were missing; use"
    ):
        with fitting("a whole", torch.device("cuda", 0), "use a half"):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
