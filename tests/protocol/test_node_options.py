"""The options of a server on several nodes."""

import pytest

from protocol.settings.settings import DecodeSettings, PrefillSettings, load
from protocol.settings.sources import ConfigError

_NODES = ["--tp", "4", "--nnodes", "2"]


@pytest.fixture(autouse=True)
def no_secret(monkeypatch):
    monkeypatch.delenv("BATON_CLUSTER_SECRET", raising=False)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:29500", "127.0.0.1", 29500),
        ("[::1]:1", "::1", 1),
        ("localhost:65535", "localhost", 65535),
    ],
)
def test_rendezvous_is_a_host_and_a_port(address, host, port):
    settings = load(PrefillSettings, [*_NODES, "--rendezvous", address])
    assert settings.rendezvous_address == (host, port)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nnodes", "2"], "--nnodes: 2 does not divide --tp 1"),
        (["--tp", "3", "--nnodes", "2"], "use a divisor of --tp"),
        (_NODES, "--rendezvous: --nnodes 2 needs an address at which the nodes meet"),
        (["--node-rank", "1"], "1 is not the number of a node of --nnodes 1"),
        ([*_NODES, "--node-rank", "2"], "of --nnodes 2: give 0 to 1"),
        (["--rendezvous", "127.0.0.1:1"], "has no effect on a server of one node"),
        (["--node-host", "127.0.0.1"], "has no effect on a server of one node"),
        ([*_NODES, "--rendezvous", "127.0.0.1"], '"127.0.0.1" is not HOST:PORT'),
        ([*_NODES, "--rendezvous", "a:b"], '"a:b" is not HOST:PORT'),
        ([*_NODES, "--rendezvous", "a:0"], "is not HOST:PORT"),
        ([*_NODES, "--rendezvous", "http://a:1"], "is not HOST:PORT"),
        ([*_NODES, "--rendezvous", "a..b:1"], '"a..b:1" is not HOST:PORT'),
        ([*_NODES, "--rendezvous", "0.0.0.0:1"], "cannot connect to 0.0.0.0"),
        (
            [*_NODES, "--rendezvous", "127.0.0.1:1", "--node-host", "::"],
            "cannot connect to ::",
        ),
        (
            [*_NODES, "--rendezvous", "127.0.0.1:1", "--node-host", "a..b"],
            '"a..b" is not the name or address of a host',
        ),
        ([*_NODES, "--rendezvous", "10.0.0.1:1"], "set BATON_CLUSTER_SECRET"),
    ],
)
def test_contradictory_options_are_refused(argv, message):
    with pytest.raises(ConfigError) as caught:
        load(DecodeSettings, argv)
    assert message in str(caught.value)


def test_nodes_on_other_machines_are_allowed_with_a_secret(monkeypatch):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "a secret of these tests")
    argv = [*_NODES, "--rendezvous", "node-0:29500", "--node-rank", "1"]
    assert load(DecodeSettings, argv).node_rank == 1
