"""lm_eval on a running endpoint, held document by document against lm_eval's own `hf` backend.

    python -m benchmarks.evaluate --url http://127.0.0.1:8000 --tasks local_piqa --limit 40

Tasks are those in benchmarks/eval_tasks, in ../shared/eval/tasks where that is, in the folders of
--include, and lm_eval's own, which download their data. The `hf` backend loads --model in float32
on this machine; --reference none leaves it out, --save keeps its answers for a later --reference.
Texts and greediness must be equal, loglikelihoods to --tolerance. Prints a table and one JSON line;
the status is 1 when a document differs.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from benchmarks.eval_answers import (
    DIFFERENT_LINES,
    Comparison,
    TaskAnswers,
    compare,
    documents_of,
    load,
    save,
    table,
)

_OWN_TASKS = Path(__file__).parent / "eval_tasks"
_SHARED_TASKS = Path("../shared/eval/tasks")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the endpoint, without /v1")
    add("--tasks", required=True, help="names of tasks, separated by commas")
    add("--limit", type=int, help="documents of each task (default: all)")
    add("--model", help="directory, GGUF file or hub name of the model that the endpoint serves, "
        "for its tokenizer and the reference (default: the default model)")  # fmt: skip
    add("--served-model-name", help="what the endpoint calls it (default: the first of /v1/models)")
    add("--chat", action="store_true", help="ask /v1/chat/completions; for generating tasks")
    add("--text-prompts", action="store_true", help="send prompts as text, not as token ids")
    add("--concurrency", type=int, default=4, help="requests in flight")
    add("--max-length", type=int, default=2048, help="longest prompt and output together (tokens)")
    add("--reference", default="hf", help="`hf`, `none`, or a file that --save wrote")
    add("--save", type=Path, help="keeps the reference's answers in this file")
    add("--tolerance", type=float, default=1e-3, help="largest difference of loglikelihoods (nats)")
    add("--threads", type=int, help="CPU threads of the reference (default: torch's)")
    add("--include", type=Path, action="append", default=[], help="folder of further task files")
    add("--output", type=Path, help="markdown file that the table is appended to")
    add("--api-key", default="", help="sent as bearer token")
    return parser


class Runner:
    """Runs lm_eval's tasks with either backend."""

    def __init__(self, options: argparse.Namespace, model: Path) -> None:
        from lm_eval.tasks import TaskManager

        self._options = options
        self._model = model
        # The backends have unlike defaults, and a chat template writes the token itself.
        self._adds_bos = not options.chat and adds_bos(model)
        folders = [_OWN_TASKS, *options.include]
        if _SHARED_TASKS.is_dir():
            folders.append(_SHARED_TASKS)
        self._names = [name.strip() for name in options.tasks.split(",") if name.strip()]
        paths = [str(folder) for folder in folders]
        self._tasks = TaskManager(include_path=paths, include_defaults=False)
        if any(name not in self._tasks.all_tasks for name in self._names):
            self._tasks = TaskManager(include_path=paths)  # slow: reads thousands of files
        unknown = [name for name in self._names if name not in self._tasks.all_tasks]
        if unknown or not self._names:
            raise ValueError(f"--tasks {options.tasks}: no task is called {', '.join(unknown)!r}")

    def reference(self) -> dict[str, TaskAnswers]:
        """lm_eval's hf backend, in float32 on the CPU."""
        import torch

        if self._options.threads:
            torch.set_num_threads(self._options.threads)
        # The other backend keeps a token of its length free, and one more when it rolls.
        arguments = {
            "pretrained": str(self._model),
            "dtype": "float32",
            "device": "cpu",
            "max_length": self._options.max_length - 2,
            "add_bos_token": self._adds_bos,
        }
        return self._run("hf", arguments)

    def endpoint(self) -> dict[str, TaskAnswers]:
        """lm_eval's backend for endpoints of completions, or of chat completions."""
        options = self._options
        path = "chat/completions" if options.chat else "completions"
        arguments = {
            "base_url": f"{options.url}/v1/{path}",
            "model": options.served_model_name,
            "num_concurrent": options.concurrency,
            "max_retries": 1,
            "max_length": options.max_length,
        }
        if not options.chat:
            arguments |= {
                "tokenizer": str(self._model),
                "tokenizer_backend": "huggingface",
                "tokenized_requests": not options.text_prompts,
                "add_bos_token": self._adds_bos,
            }
        return self._run(f"local-{path.replace('/', '-')}", arguments)

    def _run(self, backend: str, arguments: dict[str, Any]) -> dict[str, TaskAnswers]:
        """A task at a time, so that each has its own time."""
        from lm_eval import simple_evaluate

        answers = {}
        for name in self._names:
            began = time.perf_counter()
            results = simple_evaluate(
                model=backend,
                model_args=dict(arguments),
                tasks=[name],
                limit=self._options.limit,
                task_manager=self._tasks,
                apply_chat_template=self._options.chat,
                log_samples=True,
                bootstrap_iters=0,
                batch_size=1,
            )
            assert results is not None, "only ranks above 0 get no results"
            (samples,) = results["samples"].values()
            (metrics,) = results["results"].values()
            seconds = round(time.perf_counter() - began, 1)
            answers[name] = TaskAnswers(documents_of(samples), _metrics(metrics), seconds)
        return answers


def adds_bos(model: Path) -> bool:
    """Whether the tokenizer in this directory begins every text with a token of its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    return len(tokenizer("a").input_ids) > len(tokenizer("a", add_special_tokens=False).input_ids)


def _metrics(results: dict[str, Any]) -> dict[str, float]:
    """lm_eval's "metric,filter": value, without standard errors; the filter only if it has one."""
    return {
        name.removesuffix(",none"): value
        for name, value in results.items()
        if "," in name and "_stderr" not in name and isinstance(value, (int, float))
    }


def _served_model(options: argparse.Namespace) -> str:
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        response = httpx.get(f"{options.url}/v1/models", headers=headers, timeout=30)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise ValueError(f"--url {options.url} does not answer: {error}") from error
    return str(response.json()["data"][0]["id"])


def evaluate(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Runs everything; returns the table and the figures.

    Raises:
        ValueError: options, endpoint and reference do not go together.
    """
    from model.hub import DEFAULT_MODEL, resolve_model

    model = resolve_model(options.model or DEFAULT_MODEL, None)
    settings = {"limit": options.limit, "max_length": options.max_length, "chat": options.chat}
    reference: dict[str, TaskAnswers] = {}
    if options.reference not in ("hf", "none"):
        reference = load(Path(options.reference), settings)
    options.served_model_name = options.served_model_name or _served_model(options)
    runner = Runner(options, model)
    if options.reference == "hf":
        reference = runner.reference()
        if options.save:
            save(options.save, settings, reference)
    got = runner.endpoint()
    comparisons = {
        name: compare(reference[name], task, options.tolerance, same_prompts=not options.chat)
        for name, task in got.items()
        if name in reference
    }
    return table(got, reference, comparisons), _figures(options, got, reference, comparisons)


def _figures(
    options: argparse.Namespace,
    got: dict[str, TaskAnswers],
    reference: dict[str, TaskAnswers],
    comparisons: dict[str, Comparison],
) -> dict[str, Any]:
    tasks: dict[str, dict[str, Any]] = {}
    for name, task in got.items():
        row: dict[str, Any] = {"documents": len(task.documents), "seconds": task.seconds}
        row["metrics"] = task.metrics
        if compared := comparisons.get(name):
            row |= {
                "hf_metrics": reference[name].metrics,
                "hf_seconds": reference[name].seconds,
                "requests": compared.num_requests,
                "differing_documents": compared.num_different,
                "max_difference": compared.worst,
                "differences": [str(d) for d in compared.different[:DIFFERENT_LINES]],
            }
        tasks[name] = row
    settings = {name: getattr(options, name) for name in ("url", "limit", "max_length", "chat")}
    return {"benchmark": "evaluate", "model": options.served_model_name, **settings, "tasks": tasks}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the evaluation; 0 when no document differs from the reference."""
    options = make_parser().parse_args(argv)
    options.url = options.url.rstrip("/").removesuffix("/v1")
    os.environ["OPENAI_API_KEY"] = options.api_key  # where lm_eval looks for it
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        shown, figures = evaluate(options)
    except ValueError as error:
        print(f"benchmarks.evaluate: error: {error}", file=sys.stderr)
        return 2
    different = [
        f"{name}: {difference}"
        for name, task in figures["tasks"].items()
        for difference in task.get("differences", [])
    ]
    now = datetime.now(UTC)
    print(shown, *different, sep="\n")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("a") as file:
            print(f"\n{now:%Y-%m-%d %H:%M} UTC, {figures['model']}, {options.url}\n", file=file)
            print(shown, *different, sep="\n", file=file)
    print(json.dumps(figures))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
