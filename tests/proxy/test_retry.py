"""Which failures are tried on another server."""

import pytest

from proxy.retry import (
    Failure,
    Kind,
    RetryPolicy,
    failure_of_status,
    may_retry,
    trips_breaker,
)

POLICY = RetryPolicy(max_deliveries=2)


@pytest.mark.parametrize(
    ("status", "failure"),
    [(200, None), (302, None), (400, None), (429, None), (500, Failure.ERROR),
     (502, Failure.ERROR), (503, Failure.BUSY), (504, Failure.ERROR)],
)  # fmt: skip
def test_only_5xx_is_a_failure(status: int, failure: Failure | None) -> None:
    assert failure_of_status(status) is failure


def test_a_server_whose_engine_died_had_the_request() -> None:
    assert failure_of_status(503, "engine_died") is Failure.DIED
    assert failure_of_status(503, "overloaded") is Failure.BUSY
    assert failure_of_status(500, "engine_died") is Failure.ERROR


@pytest.mark.parametrize("failure", Failure)
def test_every_failed_prefill_may_be_tried_once_more(failure: Failure) -> None:
    assert may_retry(Kind.PREFILL, [failure], POLICY)


@pytest.mark.parametrize("failure", Failure)
def test_a_decode_is_repeated_only_when_it_costs_the_client_no_second_wait(
    failure: Failure,
) -> None:
    expected = failure not in (Failure.TIMEOUT, Failure.ERROR)
    assert may_retry(Kind.DECODE, [failure], POLICY) is expected


@pytest.mark.parametrize("kind", Kind)
def test_what_was_not_delivered_may_be_tried_everywhere(kind: Kind) -> None:
    assert may_retry(kind, [Failure.UNREACHABLE, Failure.BUSY] * 10, POLICY)
    assert not may_retry(kind, [Failure.LOST, Failure.UNREACHABLE, Failure.LOST], POLICY)
    assert not may_retry(kind, [Failure.DIED, Failure.BUSY, Failure.LOST], POLICY)


def test_a_full_server_or_a_failed_peer_does_not_count_against_a_server() -> None:
    assert trips_breaker(Failure.ERROR, 500)
    assert trips_breaker(Failure.TIMEOUT, None)
    assert not trips_breaker(Failure.BUSY, 503)
    assert not trips_breaker(Failure.ERROR, 502)
    assert not trips_breaker(Failure.ERROR, 504)
