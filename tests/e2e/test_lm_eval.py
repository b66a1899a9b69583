"""lm_eval gets the same answers from a cluster as from lm_eval's `hf` backend.

Every document is compared: greedy generation and scores, in float32, with four
concurrent requests through a prefill and a decode server.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.cluster import Cluster, assert_idle, cluster

_ROOT = Path(__file__).resolve().parents[2]
_TASKS = Path(__file__).parent / "lm_eval_tasks"
_SHARED = _ROOT.parent / "shared" / "eval"
_KV_TOKENS_METRIC = 'baton_kv_tokens_total{source="%s"}'


def _evaluate(
    url: str,
    model: Path,
    scratch: Path,
    *tasks: str,
    options: Sequence[str] = (),
    reference: str,
) -> dict[str, Any]:
    """Evaluate tasks. Return the report of each task, which must have no differing
    document.

    Args:
        reference: name of a file in `scratch` with hf's answers. It is written if it
            does not exist.
    """
    saved = scratch / reference
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(scratch),
        "BATON_EVAL_DATA": str(_SHARED / "data"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    argv = ["--url", url, "--model", str(model), "--tasks", ",".join(tasks)]
    argv += ["--reference" if saved.is_file() else "--save", str(saved), *options]
    for folder in (_TASKS, _SHARED / "tasks"):
        if folder.is_dir():
            argv += ["--include", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.evaluate", *argv],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr[-8000:]
    assert done.stdout, done.stderr[-8000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["tasks"]
    for name, task in figures.items():
        assert task["differing_documents"] == 0, (name, task["differences"])
    return figures


def _kv_tokens(cluster: Cluster) -> dict[str, float]:
    """Return the decode server's counters of KV tokens, by source."""
    metrics = cluster.decode[0].metrics()
    return {
        source: metrics.get(_KV_TOKENS_METRIC % source, 0)
        for source in ("transferred", "recomputed", "skipped")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--text-prompts",)], ids=["token ids", "text"]
)
def test_local_tasks_equal_the_hf_backend_in_every_document(
    tiny_cluster, tiny_model, tiny_reference, tmp_path, options
):
    """Some outputs end with a stop string, others with an end-of-sequence token.

    Texts are longer than a window of `--max-length`. In generation tasks, every prompt
    token is pulled, or cached from an earlier request. Scoring transfers no KV.
    """
    before = _kv_tokens(tiny_cluster)
    generating = ["stories_sentence", "stories_answer"]
    tasks = [*generating, "stories_likelihood", "stories_rolling"]
    options = ("--max-length", "256", *options)
    figures = _evaluate(
        tiny_cluster.url,
        tiny_model,
        tmp_path,
        *tasks,
        options=options,
        reference="own.json",
    )
    assert [figures[task]["documents"] for task in tasks] == [20] * 4
    saved = json.loads((tmp_path / "own.json").read_text())["tasks"]
    documents = [
        document for task in generating for document in saved[task]["documents"]
    ]
    assert len({document["answers"][0] for document in documents}) > 20
    likely = [
        document["answers"][0][1]
        for document in saved["stories_likelihood"]["documents"]
    ]
    assert False in likely  # how many are True depends on the trained weights
    prompts = [document["requests"][0][0] for document in documents]
    num_tokens = sum(
        len(tiny_reference.tokenizer(prompt).input_ids) for prompt in prompts
    )
    increase = {
        source: count - before[source]
        for source, count in _kv_tokens(tiny_cluster).items()
    }
    assert increase["recomputed"] == 0
    assert increase["transferred"] + increase["skipped"] == num_tokens
    assert increase["transferred"] >= len(prompts) / 2
    assert_idle(tiny_cluster.decode[0], tiny_cluster.prefill[0])


@pytest.fixture(scope="module")
def mixed_cluster(default_model: Path) -> Iterator[Cluster]:
    prefill = ("--tp", "3", "--block-size", "16")
    with cluster(default_model, prefill_argv=prefill) as running:
        yield running


_GENERATING = ("local_lambada_gen", "local_gsm8k")
_PUBLIC = [
    ("local_lambada_gen", "12"),
    ("local_gsm8k", "2"),
    ("local_lambada_openai", "12"),
    ("local_piqa", "8"),
    ("local_arc_easy", "4"),
    ("local_wikitext", "1"),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not _SHARED.is_dir(), reason="no shared/eval next to the checkout")
@pytest.mark.parametrize(("task", "limit"), _PUBLIC)
@pytest.mark.parametrize("pair", ["default_cluster", "mixed_cluster"])
def test_public_tasks_equal_the_hf_backend_in_every_document(
    default_model, request, tmp_path, pair, task, limit
):
    evaluated_cluster: Cluster = request.getfixturevalue(pair)
    before = _kv_tokens(evaluated_cluster)
    options = ["--limit", limit]
    if task == "local_wikitext":
        # Shorter windows make smaller rounding errors in float32 sums.
        options += ["--max-length", "514"]
    name = f"{task}.json"
    figures = _evaluate(
        evaluated_cluster.url,
        default_model,
        tmp_path,
        task,
        options=options,
        reference=name,
    )
    assert figures[task]["documents"] == int(limit)
    after = _kv_tokens(evaluated_cluster)
    assert after["recomputed"] == before["recomputed"]
    assert (after["transferred"] > before["transferred"]) == (task in _GENERATING)
