"""Clusters that all end-to-end tests of a session share, and the expected answers."""

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
    """One prefill server, one decode server and a proxy. Tests must not stop or drain
    them.
    """
    with cluster(tiny_model) as running:
        yield running


@pytest.fixture(scope="module")
def all_blocks_return(tiny_cluster: Cluster) -> Iterator[None]:
    """After the tests of a module, assert that no server holds a block of their
    requests.
    """
    yield
    # The timeout is longer than the 30 s after which a lease expires if its KV is not
    # pulled.
    assert_idle(*tiny_cluster.servers()[1:], timeout_s=45)


@pytest.fixture(scope="session")
def client(tiny_cluster: Cluster) -> Iterator["openai.OpenAI"]:
    # GPU machines run some of the tests without this package.
    import openai

    with openai.OpenAI(
        base_url=f"{tiny_cluster.url}/v1", api_key="unused", max_retries=0, timeout=120
    ) as openai_client:
        yield openai_client


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Two ports that stay reserved while a server is stopped and its replacement
    starts.
    """
    with reserved_ports(2) as reserved:
        yield reserved


@pytest.fixture(scope="session")
def tiny_reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """SmolLM2-135M-Instruct from its package. If that is not installed, the test is
    skipped.
    """
    try:
        return resolve_model(DEFAULT_MODEL)
    except ModelNotAvailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def default_cluster(default_model: Path) -> Iterator[Cluster]:
    with cluster(default_model) as running:
        yield running
