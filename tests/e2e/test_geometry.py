"""One cell of each kind of difference between a prefill and a decode server; test_matrix.py has
them all."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.matrix import Farm, Geometry, check_cell, farm, model_dir

_PLAIN = Geometry()
_TWO = Geometry(tp=2)
_SMALL = Geometry(block_size=16)
_NHD = Geometry(block_size=16, layout="LBCNHD")


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tiny_cluster: Cluster) -> Iterator[Farm]:
    lent = {
        ("prefill", tiny_model, _PLAIN): tiny_cluster.prefill[0],
        ("decode", tiny_model, _PLAIN): tiny_cluster.decode[0],
    }
    with farm(max_ranks=5, lent=lent) as made:
        yield made


# In an order in which no engine is started twice.
_CELLS = {
    "blocks of 64 to 16": (_PLAIN, _SMALL),
    "NHD to head-major": (_NHD, _SMALL),
    "NHD blocks of 16 to head-major 64": (_NHD, _PLAIN),
    "tp 2 to 1": (_TWO, _PLAIN),
    "tp 2 to 1, blocks of 64 to 16": (_TWO, _SMALL),
    "tp 2 to 2": (_TWO, _TWO),
    "tp 1 to 2": (_PLAIN, _TWO),
}


@pytest.mark.parametrize("name", _CELLS)
def test_a_pair_of_geometries_equals_one_server(
    engines: Farm, tiny_model: Path, tiny_cluster: Cluster, name: str
) -> None:
    p, d = _CELLS[name]
    prefiller, decoder = engines.prefill(tiny_model, p), engines.decode(tiny_model, d)
    check_cell(prefiller, decoder, p, d, tiny_cluster.prefill[0].url, name)


@pytest.mark.parametrize(
    ("model", "p", "d"),
    [("mla", _PLAIN, _TWO), ("gqa2", _PLAIN, Geometry(tp=4))],
    ids=["latent attention, tp 1 to 2", "2 KV heads, tp 1 to 4"],
)
def test_replicated_kv_equals_one_server(
    engines: Farm, model: str, p: Geometry, d: Geometry
) -> None:
    path = model_dir(model)
    prefiller, decoder = engines.prefill(path, p), engines.decode(path, d)
    check_cell(prefiller, decoder, p, d, prefiller.url, f"{model} {p} {d}")
