"""The figures of `baton bench`, and the events from which they are computed."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench.endpoint import Timeline
from benchmarks.bench.generator import RequestRecord, Side, SideResult
from benchmarks.bench.results.figures import side_figures, table, union_s
from benchmarks.bench.slo import Slo
from benchmarks.bench.workload import Session, Turn, Workload

NO_LAG = {
    "send_lag_ms": {"p50": 0.1, "p99": 0.2, "max": 0.3},
    "loop_lag_ms": {"p50": 0.1, "p99": 0.2, "max": 0.3},
    "is_late": False,
}


def timeline(due_at: float, *token_at: float, **attributes: Any) -> Timeline:
    """Returns a completed request with one token at each of these times."""
    result = Timeline(due_at, token_at=list(token_at), ended_at=token_at[-1], done=True)
    result.output_tokens = len(token_at)
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


def result_of(timelines: list[Timeline], elapsed_s: float) -> SideResult:
    records = [
        RequestRecord(index, index, 0, "http://a", each)
        for index, each in enumerate(timelines)
    ]
    return SideResult(Side("a", ("http://a",)), "m", records, elapsed_s)


def workload_of(count: int, output_tokens: int) -> Workload:
    session = Session(0.0, (Turn(16, output_tokens),))
    return Workload((session,) * count, 512, "test")


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10))))
def test_union_of_spans_counts_no_moment_twice(spans):
    moments = set[int]()
    for start, length in spans:
        moments.update(range(start, start + length))
    assert union_s((start, start + length) for start, length in spans) == len(moments)


def test_figures_of_two_requests():
    kv = {"transferred": 5, "recomputed": 1, "skipped": 2}
    first = timeline(10.0, 10.1, 10.2, 10.4, kv=kv)
    second = timeline(10.0, 10.3, 10.5, 10.7)
    failed = Timeline(10.0, error="status 503")
    result = result_of([first, second, failed], 2.0)
    slo = Slo(ttft=0.2, itl=0.16)
    figures = side_figures(result, workload_of(3, 3), slo)
    assert figures["requests"] == 3
    assert figures["succeeded"] == 2
    assert figures["errors"] == {"status 503": 1}
    assert figures["output_tokens_per_s"] == 3.0
    assert figures["decode_tokens_per_s"] == pytest.approx(
        4 / 0.6, abs=0.01
    )  # from 10.1 s to 10.7 s
    assert figures["ttft_ms"]["p50"] == pytest.approx(200.0)
    assert figures["gap_1_2_ms"]["p50"] == pytest.approx(150.0)
    assert figures["mean_itl_ms"]["p99"] == pytest.approx(199.5)
    assert figures["normalised_ms"]["p50"] == pytest.approx(1100 / 6, 1e-4)
    assert figures["slo_met"] == 1  # the second request exceeds the TTFT limit
    assert figures["goodput_requests_per_s"] == 0.5
    assert figures["baton_kv"] == kv
    assert "goodput 0.50 requests/s: 1 of 3" in table([figures], NO_LAG)


def test_run_without_success_has_figures_and_a_table():
    result = result_of([Timeline(0.0, error="lost")], 1.0)
    figures = side_figures(result, workload_of(1, 1), Slo(ttft=1.0))
    assert figures["ttft_ms"]["p50"] is None
    json.loads(json.dumps(figures, allow_nan=False))
    assert "errors: {'lost': 1}" in table([figures], NO_LAG)


def test_late_load_generator_is_reported():
    late = {**NO_LAG, "is_late": True}
    assert "WARNING: the load generator itself was late" in table([], late)


@pytest.mark.parametrize(
    ("request_timeline", "meets"),
    [
        (timeline(0.0, 0.09, 0.13), True),
        (timeline(0.0, 0.11, 0.13), False),
        (timeline(0.0, 0.09, 0.15), False),
        (timeline(0.0, 0.09, error="lost"), False),
    ],
)
def test_late_first_token_or_slow_tokens_miss_the_slo(request_timeline, meets):
    assert request_timeline.meets(Slo(ttft=0.1, itl=0.05)) == meets


def test_only_events_with_tokens_get_a_time():
    observed = Timeline(0.0, keeps_answer=True)
    for now, data in enumerate(
        [
            '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
            '{"choices": [{"delta": {"content": "a"}}]}',
            '{"choices": [{"text": "b"}]}',
            '{"choices": [{"text": "", "token_ids": [5]}]}',
            '{"choices": [{"text": "", "finish_reason": "length"}]}',
            '{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3},'
            ' "baton_kv": {"transferred": 4}}',
            "[DONE]",
        ]
    ):
        observed.observe(data.encode(), float(now))
    assert observed.token_at == [1.0, 2.0, 3.0]
    assert observed.prompt_tokens == 4
    assert observed.output_tokens == 3
    assert observed.kv == {"transferred": 4}
    assert "".join(observed.text) == "ab"
    assert observed.token_ids == [5]
    assert observed.done


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ('{"error": {"code": "engine_died", "type": "server_error"}}', "engine_died"),
        ('{"error": {"message": "no code"}}', "error event"),
        ('{"error": "the model is overloaded"}', "the model is overloaded"),
        ('{"error": null, "choices": null}', None),
    ],
)
def test_error_events_of_all_endpoints_are_named(event, error):
    observed = Timeline(0.0)
    observed.observe(event.encode(), 1.0)
    assert observed.error == error


@pytest.mark.parametrize("event", ["5", '"text"', "[]", "{"])
def test_event_that_is_no_json_object_is_a_decode_error(event):
    """`stream` records this error as a malformed event."""
    with pytest.raises(msgspec.DecodeError):
        Timeline(0.0).observe(event.encode(), 1.0)
