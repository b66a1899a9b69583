"""The benchmark of scoring steps runs on a small model and names what it measured."""

import json

import pytest

from benchmarks.scoring_steps import main
from tests.make_models import ensure_model


def test_it_reports_every_kind_of_step(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "70", "--batch", "3", "--repeats", "1", "--threads", "1"]
    main(["--model", str(ensure_model("gqa")), *sizes])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["ms"]) == {
        "prefill",
        "prefill, scored",
        "prefill, scored, top 5",
        "decode, greedy",
        "decode, sampled",
        "decode, shaped",
    }
    assert all(0 < figure["min"] <= figure["median"] for figure in result["ms"].values())
