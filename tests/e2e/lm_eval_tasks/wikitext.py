"""Loads the articles of WikiText-2's test split from a file, for
local_wikitext.yaml.
"""

import os
import re
from pathlib import Path
from typing import Any

# Matches the titles of articles. The titles of sections have more equals signs.
_TITLE = re.compile(r"(?m)^(?= = [^=\n]+ = $)")


def detokenized(document: dict[str, Any]) -> str:
    """Return the text that is scored for an article, as in lm_eval's task wikitext."""
    from lm_eval.tasks.wikitext import preprocess_wikitext

    return str(preprocess_wikitext.wikitext_detokenizer(document))


def measured(
    document: dict[str, Any], results: list[float]
) -> dict[str, tuple[float, int]]:
    """Return, for each metric, the article's loglikelihood (nats), and the number of
    words or bytes by which the metric divides it.
    """
    from lm_eval.tasks.wikitext import preprocess_wikitext

    metrics: dict[str, tuple[float, int]] = preprocess_wikitext.process_results(
        document, results
    )
    return metrics


def load(**_: Any) -> dict[str, Any]:
    """Return the split `test`: one document per article, in the order of the file."""
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
