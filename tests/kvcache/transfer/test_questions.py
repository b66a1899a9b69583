"""Answers find their questions, once, until nobody waits for them."""

from typing import Any

import pytest

from kvcache.transfer.pull_state import FanOut, SendAbort, SendComplete, SendRenew
from kvcache.transfer.questions import OpenQuestions
from protocol.handshake import AbortLease, Complete, Renew
from protocol.messages import FirstToken, RemotePrefill

REMOTE = RemotePrefill(
    host="10.0.0.1",
    port=7,
    engine_id="P",
    incarnation="i",
    request_id="r",
    lease_id="lease",
    lease_s=30.0,
    block_ids=[1],
    block_size=16,
    num_tokens=3,
    cached_tokens=0,
    tp_size=1,
    first_tokens=[FirstToken(1)],
)


@pytest.mark.parametrize(
    ("action", "kind", "question"),
    [(SendRenew(), Renew, "renew"), (SendComplete("attempt"), Complete, "complete")],
)
def test_an_answer_finds_its_question_once(action: Any, kind: type, question: str) -> None:
    questions = OpenQuestions()
    request = questions.lease("a", REMOTE, action)
    assert isinstance(request, kind)
    assert request.incarnation == "i" and request.lease_id == "lease"
    assert questions.lease_answered("another") is None
    assert questions.lease_answered(request.nonce) == (question, "a")
    assert questions.lease_answered(request.nonce) is None


def test_completing_names_the_attempt() -> None:
    request = OpenQuestions().lease("a", REMOTE, SendComplete("attempt"))
    assert isinstance(request, Complete) and request.attempt_id == "attempt"


def test_nobody_waits_for_the_answer_to_an_abort() -> None:
    questions = OpenQuestions()
    request = questions.lease("a", REMOTE, SendAbort())
    assert isinstance(request, AbortLease) and questions.lease_answered(request.nonce) is None


def test_a_forgotten_pulls_answers_are_nobodys() -> None:
    questions = OpenQuestions()
    mine, other = (questions.lease(pull, REMOTE, SendRenew()) for pull in "ab")
    questions.forget_pull("a")
    assert questions.lease_answered(mine.nonce) is None
    assert questions.lease_answered(other.nonce) == ("renew", "b")


def test_metadata_is_asked_for_and_forgotten_by_address() -> None:
    questions = OpenQuestions()
    here, there = ("10.0.0.1", 1), ("10.0.0.2", 1)
    first, second = questions.metadata(here), questions.metadata(there)
    questions.forget_metadata(here)
    assert questions.metadata_answered(first.nonce) is None
    assert questions.metadata_answered(second.nonce) == there


def test_an_action_that_asks_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="asks nothing"):
        OpenQuestions().lease("a", REMOTE, FanOut())
