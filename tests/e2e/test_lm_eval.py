"""lm_eval asks the proxy, and hears document by document what its own `hf` backend says.

Greedy generation and scores in float32, four requests at a time, through a prefill and a decode
server.
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
_KV = 'baton_kv_tokens_total{source="%s"}'


def _evaluate(
    url: str,
    model: Path,
    scratch: Path,
    *tasks: str,
    options: Sequence[str] = (),
    reference: str,
) -> dict[str, Any]:
    """Each task's figures; `reference` is the name of the file of hf's answers in `scratch`."""
    saved = scratch / reference
    known = ("--reference", str(saved)) if saved.is_file() else ("--save", str(saved))
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(scratch),
    }
    offline |= {"BATON_EVAL_DATA": str(_SHARED / "data"), "OMP_NUM_THREADS": "1"}
    argv = [
        "--url",
        url,
        "--model",
        str(model),
        "--tasks",
        ",".join(tasks),
        *known,
        *options,
    ]
    for folder in (_TASKS, _SHARED / "tasks"):
        argv += ["--include", str(folder)] if folder.is_dir() else []
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.evaluate", *argv],
        cwd=_ROOT,
        env={**os.environ, **offline, "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1) and done.stdout, done.stderr[-8000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["tasks"]
    for name, task in figures.items():
        assert task["differing_documents"] == 0, (name, task["differences"])
    return figures


def _pulled(cluster: Cluster) -> dict[str, float]:
    metrics = cluster.decode[0].metrics()
    return {
        source: metrics.get(_KV % source, 0)
        for source in ("transferred", "recomputed", "skipped")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--text-prompts",)], ids=["token ids", "text"]
)
def test_own_tasks_equal_the_hf_backend_document_by_document(
    tiny_cluster, tiny_model, tiny_reference, tmp_path, options
):
    """A stop string ends some outputs, an end of sequence others; texts are longer than a window of
    `--max-length`. Every prompt token of what generates is pulled, or was there since an earlier
    time; scoring moves no KV."""
    before = _pulled(tiny_cluster)
    generating = ("stories_sentence", "stories_answer")
    tasks = (*generating, "stories_likelihood", "stories_rolling")
    options = ("--max-length", "256", *options)
    asked = (tiny_cluster.url, tiny_model, tmp_path, *tasks)
    figures = _evaluate(*asked, options=options, reference="own.json")
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
    assert False in likely  # and mostly True; that depends on the trained weights
    prompts = [document["requests"][0][0] for document in documents]
    num_tokens = sum(
        len(tiny_reference.tokenizer(prompt).input_ids) for prompt in prompts
    )
    risen = {
        source: count - before[source]
        for source, count in _pulled(tiny_cluster).items()
    }
    assert risen["recomputed"] == 0
    assert risen["transferred"] + risen["skipped"] == num_tokens
    assert risen["transferred"] >= len(prompts) / 2
    assert_idle(tiny_cluster.decode[0], tiny_cluster.prefill[0])


@pytest.fixture(scope="module")
def unlike_cluster(default_model: Path) -> Iterator[Cluster]:
    prefill = ("--tp", "3", "--block-size", "16")
    with cluster(default_model, prefill_argv=prefill) as running:
        yield running


_GENERATING = ("local_lambada_gen", "local_gsm8k")
_PUBLIC = [
    ("local_lambada_gen", "12"), ("local_gsm8k", "2"), ("local_lambada_openai", "12"),
    ("local_piqa", "8"), ("local_arc_easy", "4"), ("local_wikitext", "1"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not _SHARED.is_dir(), reason="no shared/eval beside the checkout")
@pytest.mark.parametrize(("task", "limit"), _PUBLIC)
@pytest.mark.parametrize("pair", ["default_cluster", "unlike_cluster"])
def test_public_tasks_equal_the_hf_backend_document_by_document(
    default_model, request, tmp_path, pair, task, limit
):
    asked: Cluster = request.getfixturevalue(pair)
    before = _pulled(asked)
    options = ["--limit", limit]
    if (
        task == "local_wikitext"
    ):  # sums of float32 over shorter windows are closer to the truth
        options += ["--max-length", "514"]
    name = f"{task}.json"
    figures = _evaluate(
        asked.url, default_model, tmp_path, task, options=options, reference=name
    )
    assert figures[task]["documents"] == int(limit)
    after = _pulled(asked)
    assert after["recomputed"] == before["recomputed"]
    assert (after["transferred"] > before["transferred"]) == (task in _GENERATING)
