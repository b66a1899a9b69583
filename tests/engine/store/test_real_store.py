"""KV of real models in a store: the tokens equal those of transformers in float32."""

from pathlib import Path

import pytest

from protocol.messages import ResumedChoice, SamplingParams
from tests.engine.store.test_region import evict_all
from tests.model.random_models import continued, make
from tests.model.test_against_transformers import CASES
from tests.rigs.real_engine import RealEngine
from tests.rigs.shadow import add
from tests.rigs.stores import FixedLink, Store, TieredGroup

NUM_TOKENS = 12
PROMPT = [(37 * i * i + 11) % 131 for i in range(250)]
GREEDY = SamplingParams(temperature=0.0)
# Block sizes of the first engine, of the second engine and of the store.
SIZES = [(8, 4, 4), (4, 16, 8)]
MODELS = ["llama", "deepseek-v3", "gemma2", "gemma3", "gpt-oss", "mistral-window"]

pytestmark = pytest.mark.slow


def tiers(folder: Path, sizes: tuple[int, int, int]) -> TieredGroup:
    """Return two engines of different geometries with one store."""
    links = [FixedLink(), FixedLink()]
    engines = [
        RealEngine(folder, block_size=size, order=order, verify="all", store_link=link)
        for size, order, link in zip(
            sizes[:2], ("BHLCND", "LBCNHD"), links, strict=True
        )
    ]
    store = Store(
        compat=engines[0].coordinator._compat,
        group_layers=engines[0].pools[0].layout.num_layers,
        block_size=sizes[2],
        num_blocks=2000,
        max_model_len=400,
        kv_verify="all",
    )
    for link in links:
        link.region = store.link().region
    return TieredGroup(store, *engines)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_evicted_conversation_continues_as_transformers_does(name, sizes, tmp_path):
    """Turns alternate between two engines. After a turn, its engine evicts all KV."""
    architecture, options = CASES[name]
    reference = make(architecture, tmp_path, **options)
    with tiers(tmp_path, sizes) as group:
        text = list(PROMPT)
        for turn in range(3):
            engine = group.engines[turn % 2]
            expected = continued(reference, text, NUM_TOKENS)
            request = group.begin(engine, text, NUM_TOKENS, sampling=GREEDY)
            assert group.tokens_of(engine, request) == expected
            num_computed = engine.kv(request)[1]
            assert turn == 0 or num_computed <= 4 * max(sizes)
            group.settle()
            evict_all(engine)
            text += [*expected, 7, turn]
        # A stream that has lost its engine continues on the other engine.
        expected = continued(reference, text, NUM_TOKENS)
        engine = group.engines[1]
        resumed = add(
            "resumed",
            text,
            NUM_TOKENS,
            GREEDY,
            resumed_choices=[ResumedChoice(expected[:5])],
        )
        engine.core.round([resumed])
        assert group.tokens_of(engine, "resumed") == expected[5:]
        assert engine.kv("resumed")[1] <= 4 * max(sizes)
        failed = engine.stat("baton_kv_transfers", outcome="failed", path="none")
        assert failed == 0
