"""lm_eval asks the proxy, and hears document by document what its own `hf` backend says.

Greedy generation in float32, four requests at a time, through a prefill and a decode server.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import MODEL
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.reference import Reference

_ROOT = Path(__file__).resolve().parents[2]
_TASKS = Path(__file__).parent / "lm_eval_tasks"
_SHARED_TASKS = _ROOT.parent / "shared" / "eval" / "tasks"
_KV = 'baton_kv_tokens_total{source="%s"}'

Answers = list[dict[str, str]]  # of one task, each with "prompt" and "response"


def _hf(model: Path, *tasks: str) -> dict[str, Any]:
    arguments = {"pretrained": str(model), "dtype": "float32", "device": "cpu"}
    return {"model": "hf", "model_args": arguments, "tasks": list(tasks)}


def _endpoint(url: str, model: Path, *tasks: str, tokenized: bool) -> dict[str, Any]:
    arguments = {
        "base_url": f"{url}/v1/completions",
        "model": MODEL,
        "tokenizer": str(model),
        "tokenizer_backend": "huggingface",
        "tokenized_requests": tokenized,
        "num_concurrent": 4,
        "max_retries": 1,
    }
    return {"model": "local-completions", "model_args": arguments, "tasks": list(tasks)}


def _evaluate(
    scratch: Path, tasks: Path, runs: Sequence[dict[str, Any]], limit: int | None = None
) -> list[dict[str, Answers]]:
    """Each run's answers by task."""
    output = scratch / "answers.json"
    spec = {"include_path": str(tasks), "limit": limit, "output": str(output), "runs": list(runs)}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(scratch)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.lm_eval_driver"],
        input=json.dumps(spec),
        cwd=_ROOT,
        env={**os.environ, **offline, "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[:8000]
    return json.loads(output.read_text())


def _assert_all_through_both_servers(
    cluster: Cluster, before: dict[str, float], reference: Reference, asked: Answers
) -> None:
    """Every prompt token of `asked` was pulled from the prefill server, none computed again."""
    decode = cluster.decode[0]
    num_tokens = sum(len(reference.tokenizer(answer["prompt"]).input_ids) for answer in asked)
    after = decode.metrics()
    risen = {
        source: after[_KV % source] - before.get(_KV % source, 0)
        for source in ("transferred", "recomputed", "skipped")
    }
    assert risen == {"transferred": num_tokens, "recomputed": 0, "skipped": 0}
    routed = cluster.proxy.metrics()['baton_proxy_requests_total{path="pd",reason="routed"}']
    assert routed >= len(asked)
    for server in (decode, cluster.prefill[0]):
        wait_until(server.all_blocks_home)


def test_own_tasks_equal_the_hf_backend_document_by_document(
    tiny_cluster: Cluster, tiny_model: Path, tiny_reference: Reference, tmp_path: Path
) -> None:
    before = tiny_cluster.decode[0].metrics()
    # Prompts as token ids that a stop string ends, and as text that an end of sequence may end.
    sentences = _endpoint(tiny_cluster.url, tiny_model, "stories_sentence", tokenized=True)
    answers = _endpoint(tiny_cluster.url, tiny_model, "stories_answer", tokenized=False)
    hf = _hf(tiny_model, "stories_sentence", "stories_answer")
    expected, *got = _evaluate(tmp_path, _TASKS, [hf, sentences, answers])
    through = {**got[0], **got[1]}
    for task in ("stories_sentence", "stories_answer"):
        assert len(expected[task]) == 20
        assert through[task] == expected[task]
    assert len({answer["response"] for answer in expected["stories_answer"]}) > 10
    asked = [answer for task in through.values() for answer in task]
    _assert_all_through_both_servers(tiny_cluster, before, tiny_reference, asked)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not _SHARED_TASKS.is_dir(), reason="no shared/eval beside the checkout")
@pytest.mark.parametrize(("task", "limit"), [("local_lambada_gen", 12), ("local_gsm8k", 2)])
def test_public_tasks_equal_the_hf_backend_document_by_document(
    default_model: Path, default_cluster: Cluster, tmp_path: Path, task: str, limit: int
) -> None:
    before = default_cluster.decode[0].metrics()
    through = _endpoint(default_cluster.url, default_model, task, tokenized=True)
    runs = [_hf(default_model, task), through]
    expected, got = _evaluate(tmp_path, _SHARED_TASKS, runs, limit)
    assert len(expected[task]) == limit
    assert got[task] == expected[task]
    after = default_cluster.decode[0].metrics()
    assert after[_KV % "recomputed"] == before.get(_KV % "recomputed", 0)
    assert after[_KV % "transferred"] > before.get(_KV % "transferred", 0)
