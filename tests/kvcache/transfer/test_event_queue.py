from kvcache.transfer.event_queue import EventQueue
from kvcache.transfer.pull import PeerReady, PullDone, PullDrained


def test_news_are_told_once_and_drained_in_order() -> None:
    told: list[int] = []
    queue = EventQueue(lambda: told.append(1))
    queue.tell()
    assert told == []
    done = PullDone("a", 10, 2, 0.5, "direct")
    queue.append(done)
    queue.append(PullDrained("b"))
    queue.tell()
    queue.tell()
    assert len(told) == 1 and queue.drain() == [done, PullDrained("b")]
    queue.append(PeerReady("P", "i"))
    queue.tell()
    assert len(told) == 2 and queue.drain() == [PeerReady("P", "i")] and queue.drain() == []
    counters = queue.counters
    assert (counters["pulls_done"], counters["pulls_drained"], counters["pulls_failed"]) == (
        1,
        1,
        0,
    )
    assert (counters["bytes_pulled"], counters["descriptors"]) == (10, 2)


def test_nobody_has_to_listen() -> None:
    queue = EventQueue()
    queue.append(PullDrained("b"))
    queue.tell()
    assert queue.drain() == [PullDrained("b")]
