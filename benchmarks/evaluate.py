"""Runs lm_eval on an endpoint and on the backend `hf`, and compares the answers.

    python -m benchmarks.evaluate --url http://127.0.0.1:8000 --tasks piqa --limit 40

--tasks names tasks in the folders of --include, or lm_eval's own tasks, which download
their data. The `hf` backend loads --model in float32 on this machine. --reference none
skips the `hf` backend. --save stores the answers of `hf`, and a later run can use this
file as --reference.

Documents are compared one by one. Texts must be equal. Loglikelihoods must be equal
within --tolerance, and both sides must agree on whether greedy decoding would produce
the text. For an endpoint with a quantized model, --accuracy compares only the scores.
The program prints a table and one JSON line. Its exit status is 1 if answers differ, or
with --accuracy if scores do.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.answers import (
    TaskAnswers,
    compare,
    compare_scores,
    documents_of,
    load,
    metrics_of,
    save,
    table,
)
from benchmarks.bench.endpoint import find_model, open_session

# A saved reference is valid only for a run with equal values of these options.
_SETTINGS = ("limit", "max_length", "chat")


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
    add(
        "--model",
        help="directory, GGUF file or hub name of the model that the endpoint serves, "
        "for its tokenizer and the reference (default: the default model)",
    )
    add(
        "--chat",
        action="store_true",
        help="use /v1/chat/completions; for generation tasks",
    )
    add(
        "--text-prompts",
        action="store_true",
        help="send prompts as text, not as token ids",
    )
    add("--concurrency", type=int, default=4, help="requests in flight")
    add(
        "--max-length",
        type=int,
        default=2048,
        help="longest prompt and output together (tokens)",
    )
    add("--reference", default="hf", help="`hf`, `none`, or a file that --save wrote")
    add(
        "--save",
        type=Path,
        help="file for the answers of hf or, with `--reference none`, of the endpoint; "
        "not written if --reference is a file",
    )
    add(
        "--tolerance",
        type=float,
        default=1e-3,
        help="largest difference of loglikelihoods (nats)",
    )
    add(
        "--accuracy",
        type=float,
        help="compare scores instead of answers: limit of the mean difference plus two "
        "standard errors (0.05: five points)",
    )
    add("--include", action="append", default=[], help="folder with task files to add")
    add("--api-key", default="", help="sent as bearer token")
    return parser


# -- lm_eval


class Runner:
    """Runs lm_eval's tasks with the hf backend or with the endpoint.

    Raises:
        ValueError: --tasks names no task, or an unknown task.
    """

    def __init__(self, options: argparse.Namespace, model: Path) -> None:
        from lm_eval.tasks import TaskManager

        self._options = options
        self._model = model
        # The backends have different defaults for adding a first token (BOS), so the
        # argument add_bos_token is always set. A chat template writes this token
        # itself.
        self._adds_bos = not options.chat and adds_bos(model)
        self._names = [
            name.strip() for name in options.tasks.split(",") if name.strip()
        ]
        self._tasks = TaskManager(include_path=options.include, include_defaults=False)
        if any(name not in self._tasks.all_tasks for name in self._names):
            # lm_eval's own tasks are thousands of files that are slow to read, so they
            # are read only if needed.
            self._tasks = TaskManager(include_path=options.include)
        unknown = [name for name in self._names if name not in self._tasks.all_tasks]
        if not self._names:
            raise ValueError(f"--tasks {options.tasks!r} names no task")
        if unknown:
            raise ValueError(
                f"--tasks names unknown tasks: {', '.join(unknown)}; "
                "neither lm_eval nor the folders of --include have them"
            )

    def reference(self) -> dict[str, TaskAnswers]:
        """Return the answers of lm_eval's hf backend, in float32 on the CPU."""
        # hf gets max_length - 2, so that both backends truncate the requests for a
        # loglikelihood at the same place. The endpoint backend lowers its max_length by
        # 1 for a context with its continuation, and by 2 for windows of rolling
        # loglikelihoods. hf adds 1 for a context with its continuation. In generation
        # tasks, hf may keep one token less of a context that is too long.
        arguments = {
            "pretrained": str(self._model),
            "dtype": "float32",
            "device": "cpu",
            "max_length": self._options.max_length - 2,
            "add_bos_token": self._adds_bos,
        }
        return self._run("hf", arguments)

    def endpoint(self, served_model: str) -> dict[str, TaskAnswers]:
        """Return the answers of the endpoint. With --chat, use its chat completions."""
        options = self._options
        path = "chat/completions" if options.chat else "completions"
        arguments = {
            "base_url": f"{options.url}/v1/{path}",
            "model": served_model,
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
        """Run one task after the other, so that the duration of each is known."""
        from lm_eval import simple_evaluate

        answers = {}
        for name in self._names:
            started_at = time.perf_counter()
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
            assert results is not None, "lm_eval returns None on ranks above 0 only"
            (samples,) = results["samples"].values()
            (metrics,) = results["results"].values()
            seconds = round(time.perf_counter() - started_at, 1)
            answers[name] = TaskAnswers(
                documents_of(samples), metrics_of(metrics), seconds
            )
        return answers


def adds_bos(model: Path) -> bool:
    """Return whether the tokenizer in a directory adds tokens such as BOS to texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    token_ids = tokenizer("a").input_ids
    plain_token_ids = tokenizer("a", add_special_tokens=False).input_ids
    return len(token_ids) > len(plain_token_ids)


# -- the program


async def _served_model(options: argparse.Namespace) -> str:
    async with open_session(options.url, 30.0, options.api_key) as session:
        return str((await find_model(session, options.url))["id"])


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Run the tasks on the endpoint and the reference; return the figures.

    Raises:
        ValueError, RuntimeError: an option is invalid, the endpoint does not answer or
            lists no model, or the reference does not match the options.
    """
    from model.hub import DEFAULT_MODEL, resolve_model

    model = resolve_model(options.model or DEFAULT_MODEL, None)
    settings = {name: getattr(options, name) for name in _SETTINGS}
    reference: dict[str, TaskAnswers] = {}
    if options.reference not in ("hf", "none"):
        reference = load(Path(options.reference), settings)
    served_model = asyncio.run(_served_model(options))
    runner = Runner(options, model)
    if options.reference == "hf":
        reference = runner.reference()
        if options.save:
            save(options.save, settings, reference)
    tasks: dict[str, dict[str, Any]] = {}
    answers = runner.endpoint(served_model)
    if options.reference == "none" and options.save:
        save(options.save, settings, answers)
    for name, task in answers.items():
        row: dict[str, Any] = {
            "documents": len(task.documents),
            "seconds": task.seconds,
            "metrics": task.metrics,
        }
        reference_task = reference.get(name)
        if reference_task:
            row |= compare(
                reference_task,
                task,
                options.tolerance,
                same_prompts=not options.chat,
            )
            if options.accuracy is not None:
                row |= compare_scores(reference_task, task, options.accuracy)
        tasks[name] = row
    figures = {"benchmark": "evaluate", "model": served_model, "url": options.url}
    return {**figures, **settings, "tasks": tasks}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the evaluation.

    Returns:
        The exit status: 0 if nothing differs from the reference, 1 if answers (with
        --accuracy: scores) differ, 2 after an error.
    """
    options = make_parser().parse_args(argv)
    options.url = options.url.rstrip("/").removesuffix("/v1")
    os.environ["OPENAI_API_KEY"] = options.api_key  # lm_eval reads this variable
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        figures = evaluate(options)
    except (ValueError, RuntimeError) as error:
        print(f"benchmarks.evaluate: error: {error}", file=sys.stderr)
        return 2
    tasks = figures["tasks"]
    differences = [
        f"{name}: {difference}"
        for name, task in tasks.items()
        for difference in task.get("differences", [])
    ]
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    print(f"\n{now}, {figures['model']}, {options.url}\n")
    print(table(tasks), *differences, json.dumps(figures), sep="\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
