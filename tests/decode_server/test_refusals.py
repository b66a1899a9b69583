from decode_server.server import RefusalAlarm
from protocol.errors import KVParamsRejected

_SECRET = KVParamsRejected("signature: give all one secret", param="signature")
_PROMPT = KVParamsRejected("prompt_digest: ask both for the same", param="prompt_digest")


def _warnings(alarm: RefusalAlarm, begin_s: int, refusals: list[KVParamsRejected | None]) -> list:
    """One reference a second; what is warned of, and when."""
    told = ((s, alarm.heard(refusal, float(s))) for s, refusal in enumerate(refusals, begin_s))
    return [(s, warning) for s, warning in told if warning is not None]


def test_while_most_references_are_refused_it_warns_once_a_minute_with_the_commonest_reason() -> (
    None
):
    mostly = [_SECRET, _SECRET, _PROMPT, None] * 60
    found = _warnings(RefusalAlarm(), 1000, mostly)
    assert [s for s, _ in found] == [1060, 1120, 1180]
    for _, warning in found:
        assert "45 of 60 references" in warning and "last 60 s" in warning
        assert warning.endswith("mostly: signature: give all one secret")


def test_it_is_silent_while_half_of_them_are_used_and_ends_with_its_cause() -> None:
    alarm = RefusalAlarm()
    assert not _warnings(alarm, 0, [_SECRET, None] * 90)
    assert [s for s, _ in _warnings(alarm, 180, [_PROMPT] * 60 + [None] * 240)] == [240]


def test_a_minute_that_nobody_ends_is_judged_when_somebody_comes() -> None:
    alarm = RefusalAlarm()
    assert not _warnings(alarm, 0, [_PROMPT] * 3)
    ((_, warning),) = _warnings(alarm, 600, [None])
    assert "3 of 3 references" in warning and "last 600 s" in warning
    assert not _warnings(alarm, 700, [None, None])
