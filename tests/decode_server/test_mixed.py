"""Any mixture of requests, faults and aborts through a prefill and a decode engine.

Several choices, scores, stop tokens and aborts of single choices, over few blocks, with steps that
run ahead or do not: each text is its prompt's own, and every block comes home.
"""

import random
from typing import Any, ClassVar

import pytest

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from protocol.messages import AbortRequest, SamplingParams
from tests.rigs.engine_pair import Pair
from tests.rigs.shadow import expected_output, expected_scores

NUM_BLOCKS = 17
SAMPLING = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, presence_penalty=0.5),
    SamplingParams(temperature=0.0, repetition_penalty=2.0, min_tokens=3),
    SamplingParams(temperature=0.0, min_tokens=2),
]
PREFIXES = [[], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9], [6] * 11]


class SmallPair(Pair):
    limits: ClassVar[dict[str, int]] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 7,
        "max_model_len": 30,
    }

    def make_pool(self, block_size: int, order: str) -> KVPool:
        # The prefill server's comes first; it is to have room beside what stalled pulls lease.
        num_blocks = NUM_BLOCKS if hasattr(self, "p") else 400
        return KVPool(KVLayout(order, num_blocks, 2, 2, 2, block_size, 4, "float32"))


def run_mixture(pair: Pair, rng: random.Random, num_requests: int) -> None:
    asked: dict[str, tuple[list[int], int, dict[str, Any]]] = {}
    cut: set[tuple[str, int]] = set()
    for _ in range(num_requests):
        prompt = [*rng.choice(PREFIXES), *rng.choices(range(50), k=rng.randint(1, 9))]
        max_tokens, num_choices = rng.randint(1, 9), rng.choice([1, 1, 2, 3, 4])
        num_top = rng.choice([None, None, None, 0, 2])
        members = {
            "num_choices": num_choices,
            "num_prompt_logprobs": num_top,
            "stop_token_ids": rng.choices(range(50), k=rng.randint(0, 6)),
            "sampling": rng.choice(SAMPLING),
        }
        params = pair.prefill(prompt, **members)
        match rng.randrange(8):
            case 0:
                pair.d.agent.fail(1)
            case 1:
                pair.d.agent.stall()
            case 2:
                pair.now_s += 1e6  # every lease ends
            case 3 | 4:
                pair.d.agent.resume()
        name = pair.ask(prompt, params, max_tokens, **members)
        asked[name] = prompt, max_tokens, members
        for _ in range(rng.randrange(4)):
            pair.d.core.round([])
            pair.d.core.scheduler.check_integrity()
            if rng.random() < 0.2:
                victim = rng.choice(list(asked))
                choice = rng.randrange(asked[victim][2]["num_choices"])
                if rng.random() < 0.3:
                    pair.d.core.round([AbortRequest(victim)])
                    cut |= {(victim, choice) for choice in range(4)}
                else:
                    pair.d.core.round([AbortRequest(victim, choice)])
                    cut.add((victim, choice))
        if rng.random() < 0.3:
            pair.d.agent.resume()
            pair.answers(name, num_choices)
    pair.d.agent.resume()
    for name, (prompt, max_tokens, members) in asked.items():
        num_choices, num_top = members["num_choices"], members["num_prompt_logprobs"]
        stop, min_tokens = members["stop_token_ids"], members["sampling"].min_tokens
        answers = pair.answers(name, num_choices)
        ends = pair.d.out.terminals(name)
        assert sorted(end.choice for end in ends) == list(range(num_choices))
        limit = min(max_tokens, 30 - len(prompt))
        for end in ends:
            expected = expected_output(prompt, limit, stop, end.choice, min_tokens)
            tokens = answers[end.choice]
            if end.finish_reason == "abort":
                assert (name, end.choice) in cut
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
        scores = pair.d.out.prompt_logprobs(name)
        if num_top is None:
            assert scores == []
        else:
            wanted = expected_scores(prompt, num_top)
            assert scores == (wanted[: len(scores)] if (name, 0) in cut else wanted)
    pair.until(lambda: pair.d.core.is_idle and pair.p.core.is_idle)
    pair.settle()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_is_answered_right(depth: int, seed: int) -> None:
    pair = SmallPair(depth=depth, d_block_size=3 + seed % 3)
    try:
        run_mixture(pair, random.Random(seed), 12)
    finally:
        pair.d.agent.resume()
        pair.close()
