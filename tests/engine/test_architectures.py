"""Every architecture through a prefill and a decode engine of unlike geometry: the tokens of
transformers. Prompts are longer than a step, so they are computed in chunks over paged KV."""

import pytest

from model.architectures.table import ARCHITECTURES
from protocol.messages import SamplingParams
from tests.model.random_models import continued, make
from tests.model.test_against_transformers import CASES
from tests.rigs.engine_pair import RealPair
from tests.rigs.shadow import add

PROMPT = [(37 * at * at + 11) % 131 for at in range(170)]
NEXT = [*PROMPT[:93], 5, 9]  # what both sides know of it ends within windows of 40 tokens
NUM_TOKENS = 10


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_pair_of_engines_continues_as_transformers_does(name, tmp_path):
    architecture, options = CASES[ARCHITECTURES[name].proof]
    reference = make(architecture, tmp_path, **options)
    pair = RealPair(tmp_path, p_block_size=8, block_size=4, p_order="LBCNHD")
    for prompt in (PROMPT, NEXT):
        request = add("r", prompt, NUM_TOKENS, SamplingParams(temperature=0.0))
        found = pair.prefill_and_decode(request).tokens("r")
        assert found == continued(reference, prompt, NUM_TOKENS)
    pair.settle()
    pair.close()
