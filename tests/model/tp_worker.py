"""One rank of a tensor-parallel group, for test_parallel: `python -m tests.model.tp_worker JSON`.

Prints, as JSON: per case the greedy tokens and the bits of the last logits, whatever rank it is.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch

from model.config import load_config
from model.parallel import Parallel
from model.registry import load_model
from tests.model.dense import DenseAttention, greedy

PROMPT = list(range(3, 40))


def observe(case: dict, parallel: Parallel) -> dict:
    """Greedy tokens, logits and cached heads of a model loaded for this rank."""
    folder = Path(case["folder"])
    model = load_model(
        load_config(folder),
        folder,
        dtype=torch.float32,
        parallel=parallel,
        load_format=case["load_format"],
    )
    attention = DenseAttention(model.attention_spec)
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(PROMPT), torch.arange(len(PROMPT)), attention)
        logits = model.logits(hidden[-2:])
    return {
        "ids": greedy(model, PROMPT, 16),
        "digest": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        "logits": logits.tolist(),
        "kv_heads": model.attention_spec.num_kv_heads,
    }


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    parallel = Parallel.connect(task["rank"], task["size"], host="127.0.0.1", port=task["port"])
    observed = [observe(case, parallel) for case in task["cases"]]
    parallel.close()
    print(json.dumps(observed))


if __name__ == "__main__":
    main()
