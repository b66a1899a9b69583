"""Any prefill geometry with any decode geometry generates the tokens of a single
server.

The expected tokens come from a single decode server with tensor parallelism 1 and
without a prefix cache. Cells with a common server are adjacent, so that each server
starts once.
"""

from collections.abc import Iterator
from itertools import product

import pytest

from kvcache.layout import NAMED_ORDERS
from tests.e2e.matrix import Farm, Geometry, Key, check_cell, farm, model_dir

pytestmark = pytest.mark.slow

_TP = (1, 2, 4)
_ORACLE = Geometry(options=("--no-enable-prefix-caching",))


@pytest.fixture(scope="module")
def engines() -> Iterator[Farm]:
    with farm(max_ranks=14) as servers:
        yield servers


def _check(engines: Farm, model: str, p: Geometry, d: Geometry) -> None:
    path = model_dir(model)
    prefiller, decoder, oracle = engines.get(
        Key("prefill", path, p), Key("decode", path, d), Key("decode", path, _ORACLE)
    )
    check_cell(prefiller, decoder, p, d, oracle.url, f"{model} {p} {d}")


@pytest.mark.parametrize(
    ("model", "p", "d"), list(product(("gqa4", "gqa2", "mla"), _TP, _TP))
)
def test_every_tensor_parallelism(engines, model, p, d):
    _check(engines, model, Geometry(p), Geometry(d))


@pytest.mark.parametrize(("tp", "dcp"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("p", _TP)
@pytest.mark.parametrize("model", ["gqa4", "gqa2", "mla"])
def test_every_number_of_ranks_that_share_tokens(engines, model, p, tp, dcp):
    _check(engines, model, Geometry(p), Geometry(tp, dcp=dcp))


@pytest.mark.parametrize(("p", "d"), list(product((16, 64), repeat=2)))
def test_every_block_size(engines, p, d):
    _check(engines, "gqa4", Geometry(1, p), Geometry(2, d))


@pytest.mark.parametrize(("p", "d"), list(product(NAMED_ORDERS, repeat=2)))
def test_every_named_layout(engines, p, d):
    _check(engines, "gqa4", Geometry(2, 64, p), Geometry(1, 64, d))


@pytest.mark.parametrize(("p", "d"), [(3, 2), (2, 3), (3, 1), (6, 3)])
def test_sizes_that_do_not_divide_one_another(engines, p, d):
    _check(engines, "gqa6", Geometry(p), Geometry(d))


# In the first pair, the staging memory holds only two or three blocks of the peer. So
# pulls have many chunks and wait for one another.
_COMBINED = [
    (
        "gqa4",
        Geometry(4, 24, "LBCNHD"),
        Geometry(1, 16, options=("--staging-bytes", "500000")),
    ),
    ("gqa4", Geometry(1, 16, "LCBNHD"), Geometry(2, 24, "LBCHND")),
    ("gqa2", Geometry(4, 16, "BLCHND"), Geometry(2, 40, "LCBNHD")),
    ("mla", Geometry(2, 24, "LBCNHD"), Geometry(4, 16)),
    ("mla", Geometry(4, 16), Geometry(1, 24, "LCBHND")),
    ("gqa6", Geometry(3, 16, "LBCNHD"), Geometry(2, 100, "BNCLHD")),
    ("gqa4", Geometry(1, 1), Geometry(2, 256)),
    ("moe", Geometry(2), Geometry(1)),
    ("gqa4", Geometry(2, 256), Geometry(1, 1)),
    ("gqa4", Geometry(4, 8, "LBCNHD"), Geometry(4, 24, "LCBHND", dcp=2)),
    (
        "mla",
        Geometry(2, 16),
        Geometry(4, 16, "LBCNHD", ("--transfer", "mapped"), dcp=4),
    ),
]


@pytest.mark.parametrize(("model", "p", "d"), _COMBINED, ids=str)
def test_differences_combined(engines, model, p, d):
    _check(engines, model, p, d)
