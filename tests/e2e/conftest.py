"""Clusters shared by the end-to-end tests of a session, and the reference they are held against."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from model.errors import ModelNotAvailable
from model.hub import DEFAULT_MODEL, resolve_model
from tests.e2e.reference import Reference
from tests.make_models import ensure_model
from tests.ports import reserved_ports
from tests.rigs.cluster import Cluster, assert_idle, cluster

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return ensure_model("gqa")


@pytest.fixture(scope="session")
def tiny_cluster(tiny_model: Path) -> Iterator[Cluster]:
    """One prefill server, one decode server, one proxy; tests leave it as they found it."""
    with cluster(tiny_model) as running:
        yield running


@pytest.fixture(scope="module")
def all_blocks_return(tiny_cluster: Cluster) -> Iterator[None]:
    """Holds a module to it: once its tests have ended, no server keeps a block for them."""
    yield
    assert_idle(
        *tiny_cluster.servers()[1:], timeout_s=45
    )  # a lease that nobody ends lasts 30 s


@pytest.fixture(scope="session")
def client(tiny_cluster: Cluster) -> Iterator["openai.OpenAI"]:
    import openai  # GPU machines run part of these tests without it

    with openai.OpenAI(
        base_url=f"{tiny_cluster.url}/v1", api_key="unused", max_retries=0, timeout=120
    ) as made:
        yield made


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Two that no other program takes while a server there is replaced by another."""
    with reserved_ports(2) as kept:
        yield kept


@pytest.fixture(scope="session")
def tiny_reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """SmolLM2-135M-Instruct out of its package, which a machine need not have."""
    try:
        return resolve_model(DEFAULT_MODEL)
    except ModelNotAvailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def default_cluster(default_model: Path) -> Iterator[Cluster]:
    with cluster(default_model) as running:
        yield running
