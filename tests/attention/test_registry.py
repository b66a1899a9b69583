"""Backends are found by name."""

from importlib.util import find_spec

import pytest

from attention.registry import BackendMissing, backend_class, create_backend
from kvcache.layout import KVLayout
from kvcache.pool import KVPool


def make_pool() -> KVPool:
    return KVPool(
        KVLayout(
            order="BHLCND",
            num_blocks=4,
            num_heads=2,
            num_layers=1,
            num_components=2,
            block_size=4,
            head_dim=16,
            dtype="float32",
        )
    )


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_every_known_name_makes_a_backend(name: str) -> None:
    backend = create_backend(name, make_pool(), num_q_heads=6, head_dim=16, scale=0.25)
    assert (backend.num_q_heads, backend.num_kv_heads, backend.head_dim) == (6, 2, 16)


def test_an_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"magic.*auto, torch"):
        create_backend("magic", make_pool(), num_q_heads=6, head_dim=16, scale=0.25)


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="it is installed")
@pytest.mark.parametrize("num_components", [1, 2])
def test_a_missing_package_is_named_with_its_fix(num_components: int) -> None:
    with pytest.raises(BackendMissing, match=r"pip install flashinfer-python, or use --att"):
        backend_class("auto", "cuda", num_components)


def test_flashinfer_is_refused_where_it_cannot_serve() -> None:
    with pytest.raises(ValueError, match=r"flashinfer .*--attention-backend torch"):
        create_backend("flashinfer", make_pool(), num_q_heads=6, head_dim=16, scale=0.25)
