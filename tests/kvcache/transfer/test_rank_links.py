from collections.abc import Iterator

import pytest
import zmq

from kvcache.transfer.pull import Hello, RankEnded, StopPull, command_decoder, encode
from kvcache.transfer.rank_links import RankLinks

DEADLINE_MS = 20_000
Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


def close(links: RankLinks, *dealers: zmq.Socket[bytes]) -> None:
    links.close()
    for dealer in dealers:
        dealer.close(linger=0)


def worker(context: Context, links: RankLinks) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.set_hwm(0)
    dealer.connect(links.address)
    return dealer


def commands(dealer: zmq.Socket[bytes], count: int) -> list[str]:
    found = []
    for _ in range(count):
        assert dealer.poll(DEADLINE_MS), f"{len(found)} of {count} commands came"
        command = command_decoder.decode(dealer.recv())
        assert isinstance(command, StopPull)
        found.append(command.pull_id)
    return found


def test_commands_wait_for_a_rank_to_appear(context: Context) -> None:
    links = RankLinks(context, "tcp://127.0.0.1:0", 2)
    links.broadcast(StopPull("early"))
    dealers = [worker(context, links) for _ in range(2)]
    for rank, dealer in enumerate(dealers):
        dealer.send(encode(Hello(rank)))
    ended = RankEnded(pull_id="p", rank=1, complete=True)
    dealers[1].send(encode(ended))
    reports = []
    while not reports:
        assert links.socket.poll(DEADLINE_MS)
        reports = links.receive()
    assert reports == [ended]
    assert commands(dealers[1], 1) == ["early"]
    while not dealers[0].poll(0):  # its greeting may still be on the way
        links.socket.poll(10)
        links.receive()
    links.broadcast(StopPull("late"))
    assert commands(dealers[0], 2) == ["early", "late"]
    assert commands(dealers[1], 1) == ["late"]
    close(links, *dealers)


def test_a_rank_that_is_busy_loses_no_command(context: Context) -> None:
    """A ROUTER drops silently above its high-water mark, 1,000 unless told otherwise."""
    links = RankLinks(context, "inproc://links", 1)
    dealer = worker(context, links)
    dealer.send(encode(Hello(0)))
    assert links.socket.poll(DEADLINE_MS)
    assert links.receive() == []
    for index in range(5000):
        links.broadcast(StopPull(str(index)))
    assert commands(dealer, 5000) == [str(index) for index in range(5000)]
    close(links, dealer)
