"""Tensor-parallel ranks compute what a single rank computes. Impossible sizes are
refused.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from model.config import load_config, parse_config
from model.decoder import load_model
from model.errors import InvalidParallelism
from model.parallel import Parallel
from model.sizes import check_parallelism
from tests.model.dense import DenseAttention, greedy
from tests.model.random_models import make
from tests.model.test_against_transformers import CASES
from tests.model.test_config import DEEPSEEK, LLAMA

PROMPT = list(range(3, 40))
# 2 and 3 ranks divide 12 query heads and 6 KV heads evenly. 4 ranks do not divide the
# KV heads. The vocabulary of 131 tokens is padded.
TWELVE = {"num_attention_heads": 12, "head_dim": 8}
WIDE = {
    "hidden_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 8,
}
MODELS = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide": ("LlamaForCausalLM", {**WIDE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16, "num_key_value_heads": 2}),
    "deepseek": ("DeepseekV2ForCausalLM", {"q_lora_rank": 24}),
    # With 4 ranks, each of 2 KV heads is on two ranks, and the norm is over all heads.
    "olmo2": ("Olmo2ForCausalLM", {"num_key_value_heads": 2, "attention_bias": True}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": None}),
    "granite-moe": CASES["granite-moe"],
    "glm4-moe": CASES["glm4-moe"],
    "qwen2-moe": CASES["qwen2-moe"],
    "gpt-oss": (CASES["gpt-oss"][0], {**CASES["gpt-oss"][1], "sliding_window": 16}),
}
EXPERTS = ["deepseek", "granite-moe", "glm4-moe", "qwen2-moe", "gpt-oss"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    cases = {}
    for name, (architecture, options) in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        make(architecture, folder, **options)
        cases[name] = {"folder": str(folder), "load_format": "auto"}
    cases["dummy"] = {**cases["llama"], "load_format": "dummy"}
    return cases


def observe(case: dict, parallel: Parallel) -> dict:
    """Returns greedy tokens, the logits of the prompt's last two tokens, and this
    rank's number of KV heads.
    """
    folder = Path(case["folder"])
    options = {
        "dtype": torch.float32,
        "parallel": parallel,
        "load_format": case["load_format"],
    }
    model = load_model(load_config(folder), folder, **options)
    attention = DenseAttention(model.attention_spec)
    with torch.inference_mode():
        hidden = model.forward(
            torch.tensor(PROMPT), torch.arange(len(PROMPT)), attention
        )
        logits = model.logits(hidden[-2:])
    kv_heads = model.attention_spec.num_kv_heads
    return {"ids": greedy(model, PROMPT, 16), "logits": logits, "kv_heads": kv_heads}


def run_ranks(
    size: int, cases: list[dict], rendezvous_file: Path, ep: int
) -> list[list[dict]]:
    """Runs the ranks of a group in threads.

    Returns:
        For each rank, the results of `observe` for each case.
    """

    def run(rank: int) -> list[dict]:
        parallel = Parallel.connect(
            rank, size, rendezvous_file=str(rendezvous_file), ep=ep
        )
        results = [observe(case, parallel) for case in cases]
        parallel.close()
        return results

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize(
    "size, ep, names, kv_heads",
    [
        (2, 1, ["llama", "llama-wide", "qwen3", "deepseek", "dummy"], [2, 3, 1, 1, 2]),
        (2, 1, ["olmo2", "phi3", *EXPERTS[1:]], [1, 2, 2, 2, 2, 2]),
        (2, 2, EXPERTS, [1, 2, 2, 2, 2]),
        (3, 1, ["llama-wide"], [2]),
        (4, 1, ["llama", "qwen3", "deepseek", "dummy", "olmo2"], [1, 1, 1, 1, 1]),
        (4, 2, ["qwen2-moe", "deepseek", "gpt-oss"], [1, 1, 1]),
    ],
)
def test_every_rank_computes_what_a_single_rank_computes(
    size, ep, names, kv_heads, cases, tmp_path
):
    selected = [cases[name] for name in names]
    ranks = run_ranks(size, selected, tmp_path / "group", ep)
    assert [case["kv_heads"] for case in ranks[0]] == kv_heads
    for index, case in enumerate(selected):
        expected = observe(case, Parallel())
        results = [rank[index] for rank in ranks]
        assert [result["ids"] for result in results] == [expected["ids"]] * size
        for result in results:
            assert torch.equal(result["logits"], results[0]["logits"]), (
                "ranks differ in their logits"
            )
        torch.testing.assert_close(
            results[0]["logits"], expected["logits"], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    "config, size, message",
    [
        (LLAMA, 3, "--tp 3 does not divide the model's 8 query heads"),
        ({**LLAMA, **TWELVE, "num_key_value_heads": 6}, 4, "6 KV heads"),
        ({**LLAMA, "intermediate_size": 98}, 4, "intermediate_size 98"),
        ({**DEEPSEEK, "moe_intermediate_size": 22}, 4, "moe_intermediate_size 22"),
        (LLAMA, (2, 2), "--ep 2 needs a mixture of experts"),
        (
            {**DEEPSEEK, "n_routed_experts": 9},
            (2, 2),
            "--ep 2 does not divide .* 9 experts",
        ),
        (
            {**DEEPSEEK, "moe_intermediate_size": 21},
            (4, 2),
            "--tp 4 .* moe_intermediate_size 21",
        ),
    ],
)
def test_size_that_does_not_fit_is_refused(config, size, message):
    size, ep = size if isinstance(size, tuple) else (size, 1)
    with pytest.raises(InvalidParallelism, match=message):
        check_parallelism(parse_config(config), size, ep=ep)
    for fitting in (1, 2, 4, 8):
        check_parallelism(
            parse_config(DEEPSEEK if "kv_lora_rank" in config else LLAMA), fitting
        )


def test_context_groups_hold_the_same_heads_and_exchange_within_the_group(tmp_path):
    def rank_of_four(rank: int) -> tuple:
        parallel = Parallel.connect(
            rank, 4, rendezvous_file=str(tmp_path / "group"), dcp=2
        )
        context = parallel.context
        gathered = context.all_gather(torch.tensor([[10.0 * rank, 1.0]]))
        # `parts` has one part for each rank of the group.
        parts = torch.arange(4.0).view(2, 1, 2) + 10 * rank
        exchanged = context.all_to_all(parts)
        summed = parallel.all_reduce(torch.ones(1))  # a sum over all four ranks
        heads = [parallel.kv_heads(total) for total in (1, 2, 4)]
        parallel.close()
        return heads, gathered.tolist(), exchanged.tolist(), summed.item()

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(rank_of_four, range(4)))
    for rank, (heads, gathered, exchanged, summed) in enumerate(results):
        group, place = divmod(rank, 2)
        assert [list(head_range) for head_range in heads] == [
            [0],
            [group],
            [2 * group, 2 * group + 1],
        ]
        members = (2 * group, 2 * group + 1)
        assert gathered == [[[10.0 * member, 1.0]] for member in members]
        expected_parts = [
            [10.0 * member + 2 * place + i for i in range(2)] for member in members
        ]
        assert exchanged == [[part] for part in expected_parts]
        assert summed == 4


def test_groups_that_cannot_share_the_kv_heads_are_refused():
    wide = parse_config({**LLAMA, **TWELVE, "num_key_value_heads": 4})
    check_parallelism(wide, 12, 3)
    with pytest.raises(
        InvalidParallelism, match=r"--dcp 2 with --tp 12 makes 6 groups .* 4 KV heads"
    ):
        check_parallelism(wide, 12, 2)
    gemma = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 64}
    with pytest.raises(
        InvalidParallelism, match="--dcp 2 does not serve sliding windows and soft caps"
    ):
        check_parallelism(parse_config({**LLAMA, **gemma}), 4, 2)
