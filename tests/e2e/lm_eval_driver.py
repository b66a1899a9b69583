"""Runs lm_eval's Python API in a process of its own: it brings loops, globals and warnings.

    python -m tests.e2e.lm_eval_driver < spec.json

spec: {"include_path", "limit", "output", "runs": [{"model", "model_args", "tasks"}]}; writes, for
each run, {task: [{"prompt", "response"}]} in the order of the documents to the path `output`.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    spec = json.load(sys.stdin)
    manager = TaskManager(include_path=spec["include_path"], include_defaults=False)
    outputs = []
    for run in spec["runs"]:
        results = simple_evaluate(
            **run,
            limit=spec["limit"],
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
            batch_size=1,
        )
        assert results is not None
        outputs.append({task: _answers(s) for task, s in results["samples"].items()})
    Path(spec["output"]).write_text(json.dumps(outputs))


def _answers(samples: list[dict[str, Any]]) -> list[dict[str, str]]:
    # A task with several filters has a sample of each document for each of them.
    by_document = {sample["doc_id"]: sample for sample in samples}
    return [
        {"prompt": sample["arguments"][0][0], "response": sample["resps"][0][0]}
        for _, sample in sorted(by_document.items())
    ]


if __name__ == "__main__":
    main()
