"""The articles of WikiText-2's test split from a file, for local_wikitext.yaml."""

import os
import re
from pathlib import Path
from typing import Any

_TITLE = re.compile(r"(?m)^(?= = [^=\n]+ = $)")  # sections have more equals signs


def detokenized(document: dict[str, Any]) -> str:
    """Return the article as it is scored, as lm_eval's own task writes it."""
    from lm_eval.tasks.wikitext import preprocess_wikitext

    return str(preprocess_wikitext.wikitext_detokenizer(document))


def measured(
    document: dict[str, Any], results: list[float]
) -> dict[str, tuple[float, int]]:
    """Return the article's loglikelihood (nats) and the divisor, for each metric."""
    from lm_eval.tasks.wikitext import preprocess_wikitext

    metrics: dict[str, tuple[float, int]] = preprocess_wikitext.process_results(
        document, results
    )
    return metrics


def load(**_: Any) -> dict[str, Any]:
    """Return the split `test`, one document per article, in the file's order."""
    from datasets import Dataset

    path = Path(os.environ["BATON_EVAL_DATA"]) / "wikitext2_test.txt"
    return {
        "test": Dataset.from_list(
            [{"page": page} for page in articles(path.read_text())]
        )
    }


def articles(text: str) -> list[str]:
    """Split the text at the titles of articles. Text before the first title is
    dropped.
    """
    return [part for part in _TITLE.split(text) if _TITLE.match(part)]
