"""The phases of a request, from the times that a server reports."""

from protocol.server_stats import PHASES, RequestReport, phases_text


def report(generated: int = 9, recomputed: int = 0, **times: float) -> RequestReport:
    return RequestReport(
        endpoint="chat",
        outcome="stop",
        error=None,
        times=times,
        prompt_tokens=5,
        generated=generated,
        kv={"recomputed": recomputed},
    )


def test_phases_of_a_pull_follow_each_other():
    # The first token of the prefill server arrives before its KV.
    pulled = report(
        queued=1.0, admitted=2.0, read=5.0, pulled=6.0, drawn=7.0, first=3.0, end=9.0
    )
    assert pulled.phases() == {
        "queue": (1.0, 2.0),
        "transfer": (2.0, 5.0),
        "fence": (5.0, 6.0),
        "decode": (6.0, 9.0),
    }


def test_prompt_that_is_computed_here_has_a_prefill_phase_after_a_failed_pull():
    recomputed = report(
        recomputed=5, queued=1.0, admitted=2.0, pulled=4.0, drawn=6.0, first=6.5, end=9
    )
    assert recomputed.phases() == {
        "queue": (1.0, 2.0),
        "prefill": (4.0, 6.0),
        "decode": (6.5, 9.0),
    }


def test_prefill_leg_has_no_decode_phase():
    leg = report(1, recomputed=5, queued=1.0, admitted=2.0, drawn=6.0, first=6.5, end=7)
    assert list(leg.phases()) == ["queue", "prefill"]
    text = phases_text(leg.phases())
    assert text == (
        "queue_ms=1000.0 transfer_ms=- fence_ms=- prefill_ms=4000.0 decode_ms=-"
    )
    assert [part.partition("_ms")[0] for part in text.split()] == list(PHASES)


def test_refused_request_has_no_phases():
    assert report(0, end=0.1).phases() == {}
