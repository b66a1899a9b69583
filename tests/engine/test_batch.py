"""A plan becomes arrays, and the arrays survive the trip to other ranks."""

import dataclasses

import numpy as np
from msgspec.structs import replace

from engine.core.batch import build_step, step_from_bytes, step_to_bytes
from engine.core.logits_processing import SamplingRow, ShapeBook
from engine.core.scheduler import Scheduled
from engine.core.sequence import Sequence
from protocol.messages import Grammar, SamplingParams
from tests.rigs.shadow import add


def _sequence(name: str, tokens: list[int], blocks: list[int], num_computed: int) -> Sequence:
    sequence = Sequence.from_request(add(name, tokens, 4))
    sequence.block_ids = blocks
    sequence.num_computed = num_computed
    return sequence


def test_positions_slots_and_sampling_rows_of_a_mixed_step() -> None:
    decoding = _sequence("a", [1, 2, 3, 4, 5, 6], [3, 7], 5)
    chunk = _sequence("b", list(range(10, 20)), [4, 5, 6], 4)  # 10 tokens, computes 4..7
    items = [Scheduled.next_of(decoding, 1), Scheduled.next_of(chunk, 4)]
    step = build_step(items, ShapeBook())
    assert step.token_ids.tolist() == [6, 14, 15, 16, 17]
    assert step.positions.tolist() == [5, 4, 5, 6, 7]
    assert step.context_lens.tolist() == [6, 8]
    assert step.sample_rows.tolist() == [0], "a prompt that goes on draws nothing"
    assert step.last_token_rows.tolist() == [0]
    batch = step.attention_batch(block_size=4)
    assert batch.slot_mapping.tolist() == [7 * 4 + 1, 5 * 4, 5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3]
    assert batch.block_tables.tolist() == [[3, 7, 0], [4, 5, 6]]


def test_a_step_is_the_same_after_its_trip() -> None:
    sequence = _sequence("a", [1, 2, 3], [2], 0)
    params = SamplingParams(
        logit_bias={3: 1.5}, presence_penalty=0.5, grammar=Grammar("regex", "a")
    )
    sequence.request = replace(sequence.request, sampling=params)
    step = build_step([Scheduled.next_of(sequence, 3)], ShapeBook())
    step = dataclasses.replace(step, is_masked=True)
    copy = step_from_bytes(step_to_bytes(step))
    for name in ("token_ids", "query_lens", "context_lens", "block_tables", "sample_rows"):
        ours, theirs = getattr(step, name), getattr(copy, name)
        assert np.array_equal(ours, theirs) and ours.dtype == theirs.dtype, name
    assert copy.sampling == step.sampling == [SamplingParams(temperature=0.0)]
    assert copy.shapes == step.shapes and copy.shapes is not None
    assert copy.shapes.setups == [SamplingRow(0, [1, 2, 3], [], (0.5, 0.0, 1.0), {3: 1.5}, [])]
    assert copy.is_masked


def test_a_token_that_only_the_device_knows_is_named_by_the_row_that_draws_it() -> None:
    waiting = _sequence("a", [1, 2, 3, 4, 5], [3, 7], 4)
    waiting.num_launched, waiting.num_awaited, waiting.awaited_row = 1, 1, 6
    known = _sequence("b", [8, 9], [4], 1)
    items = [Scheduled.next_of(waiting, 1), Scheduled.next_of(known, 1)]
    step = build_step(items, ShapeBook())
    assert step.token_ids.tolist() == [-7, 9]
    assert step.positions.tolist() == [5, 1]
    assert step.sample_rows.tolist() == [0, 1]
