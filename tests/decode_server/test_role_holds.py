"""When the coordinator hears of a request whose prefill server is known already."""

import pytest

from protocol.messages import AbortRequest, TokenDelta
from tests.decode_server.conftest import MakePair
from tests.rigs.engine_pair import Pair
from tests.rigs.shadow import expected_output

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
LARGE = list(range(1, 121))  # 30 of 39 blocks of D
NEXT = list(range(2, 50))  # 12


def _meet(pair: Pair) -> None:
    assert pair.answer(pair.ask(PROMPT, pair.prefill(PROMPT))) == expected_output(PROMPT, 6)


@pytest.fixture(autouse=True)
def _long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "limits", {"max_model_len": 150})


def _two_of_which_one_waits(pair: Pair) -> tuple[str, str]:
    _meet(pair)
    pair.d.agent.stall()
    large = pair.ask(LARGE, pair.prefill(LARGE))
    return large, pair.ask(NEXT, pair.prefill(NEXT))


def test_the_first_token_goes_out_before_the_coordinator_hears_of_the_request(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair()
    _meet(pair)
    num_pulls: list[int] = []
    send = pair.d.out.send

    def watched(deltas: list[TokenDelta]) -> None:
        num_pulls.append(pair.coordinator.counters()["pulls"])
        send(deltas)

    monkeypatch.setattr(pair.d.out, "send", watched)
    _meet(pair)
    assert num_pulls[0] == 1
    assert num_pulls[-1] == 2
    pair.settle()


def test_the_lease_of_a_request_that_waits_for_blocks_is_held(make_pair: MakePair) -> None:
    pair = make_pair(p_block_size=8)
    large, waiting = _two_of_which_one_waits(pair)
    pair.until(lambda: pair.coordinator.counters()["pulls_open"] == 2)
    assert not pair.d.out.tokens(waiting)
    pair.d.agent.resume()
    assert pair.answer(large) == expected_output(LARGE, 6)
    assert pair.answer(waiting) == expected_output(NEXT, 6)
    pair.settle()


@pytest.mark.parametrize("held", [False, True])
def test_an_abort_before_there_are_blocks_gives_the_lease_back(
    make_pair: MakePair, held: bool
) -> None:
    pair = make_pair(p_block_size=8)
    large, waiting = _two_of_which_one_waits(pair)
    if held:
        pair.until(lambda: pair.coordinator.counters()["pulls_open"] == 2)
    pair.d.core.round([AbortRequest(waiting)])
    assert pair.d.out.terminals(waiting)[0].finish_reason == "abort"
    pair.until(lambda: pair.leases.counters()["aborted"] == 1)
    pair.d.agent.resume()
    assert pair.answer(large) == expected_output(LARGE, 6)
    pair.settle()
