"""Every architecture through a prefill and a decode engine of unlike geometry: the tokens of
transformers. Prompts are longer than a step, so they are computed in chunks over paged KV."""

import pytest
import torch

from model.architectures.table import ARCHITECTURES
from protocol.messages import SamplingParams
from tests.model.random_models import make
from tests.model.test_against_transformers import CASES
from tests.rigs.engine_pair import RealPair
from tests.rigs.shadow import add

PROMPT = [(37 * at * at + 11) % 131 for at in range(170)]
NUM_TOKENS = 10


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_pair_of_engines_continues_as_transformers_does(name, tmp_path):
    architecture, options = CASES[ARCHITECTURES[name].proof]
    reference = make(architecture, tmp_path, **options)
    wanted = reference.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()
    pair = RealPair(tmp_path, p_block_size=8, d_block_size=4, p_order="LBCNHD")
    request = add("r", PROMPT, NUM_TOKENS, SamplingParams(temperature=0.0))
    assert pair.prefill_and_decode(request).tokens("r") == wanted
    pair.settle()
    pair.close()
