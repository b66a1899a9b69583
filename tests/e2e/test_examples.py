"""The programs in examples/ run against a small cluster, as a user runs them."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.rigs.cluster import Cluster

pytestmark = pytest.mark.usefixtures("all_blocks_return")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LM_EVAL_TASKS = Path(__file__).parent / "lm_eval_tasks"
TIMEOUT_S = 300
# The examples that the tests below run.
TESTED = {"agent.py", "chat_stream.py", "structured_output.py", "tools.py"} | {
    "pd_pair.sh",
    "lm_eval.sh",
}
needs_curl_and_jq = pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq"
)


def run(
    name: str, cluster: Cluster, *argv: str, env: Mapping[str, str] | None = None
) -> str:
    """Runs an example. Returns its output."""
    program = [str(EXAMPLES / name)]
    if name.endswith(".py"):
        program.insert(0, sys.executable)
    folder = Path(sys.executable).parent
    done = subprocess.run(
        [*program, *argv],
        env={
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "OPENAI_BASE_URL": f"{cluster.url}/v1",
            "ANTHROPIC_BASE_URL": cluster.url,
            **(env or {}),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_example_is_tested_and_described():
    names = {path.name for path in EXAMPLES.iterdir() if path.name != "README.md"}
    assert names - {"__pycache__"} == TESTED
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in text for name in TESTED)


def test_chat_is_streamed(tiny_cluster):
    output = run("chat_stream.py", tiny_cluster, "Tell a story.")
    text, _, summary = output.rpartition("\n[")
    assert text and "tokens of" in summary


def test_answer_matches_the_schema(tiny_cluster):
    output = run("structured_output.py", tiny_cluster).strip()
    genre, _, year = output.rpartition(" (")[2].rstrip(")").partition(", ")
    assert genre in {"novel", "poetry", "science", "history"}
    assert 1800 <= int(year) <= 2030


def test_model_calls_the_function_of_the_program(tiny_cluster):
    first_line = run("tools.py", tiny_cluster).splitlines()[0]
    assert first_line in {"get_weather(Berlin)", "get_weather(Cairo)"}


def test_agent_reports_its_cached_tokens(tiny_cluster):
    for _ in range(2):
        output = run("agent.py", tiny_cluster)
    num_prompt, num_read = map(int, re.findall(r"\[(\d+) .* (\d+) of", output)[0])
    assert 0 < num_read < num_prompt


@needs_curl_and_jq
def test_pair_by_hand_gives_the_answer_of_the_proxy(tiny_cluster, client):
    prompt = "Emma painted the green boat near the river. Emma"
    env = {
        "PREFILL_URL": tiny_cluster.prefill[0].url,
        "DECODE_URL": tiny_cluster.decode[0].url,
    }
    output = run("pd_pair.sh", tiny_cluster, prompt, env=env)
    (model,) = client.models.list().data
    expected = client.completions.create(
        model=model.id, prompt=prompt, max_tokens=16, temperature=0
    )
    answer, _, rest = output.partition("answer: ")[2].partition("\nusage: ")
    assert answer == expected.choices[0].text
    assert "KV: transferred=" in output
    usage = json.loads(rest.splitlines()[0])
    assert usage["completion_tokens"] == 16
    assert usage["prompt_tokens"] == expected.usage.prompt_tokens


@pytest.mark.slow
@needs_curl_and_jq
def test_lm_eval_scores_documents(tiny_cluster, tiny_model):
    argv = ["--tasks", "stories_answer", "--include_path", str(LM_EVAL_TASKS)]
    env = {"TOKENIZER": str(tiny_model), "HF_HUB_OFFLINE": "1"}
    output = run("lm_eval.sh", tiny_cluster, *argv, "--limit", "3", env=env)
    assert "|stories_answer" in output
