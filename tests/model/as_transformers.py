"""Compares Baton with transformers: both must compute the same logits, or both refuse
the config.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from model.config import load_config
from model.errors import ModelError
from tests.model.dense import DenseAttention
from tests.model.random_configs import PROMPT_TOKENS
from tests.model.random_models import load, make_of

# Patterns of the errors with which Baton refuses configs that transformers accepts, and
# the reasons.
REFUSALS = {
    r"^hidden_act(ivation)? .* is not supported": (
        "activations that no served model has"
    ),
    r"^clip_qkv .* is not supported": "not implemented",
    r"^(attn|final)_logit_softcapping .* in this architecture": (
        "transformers ignores it"
    ),
    r"^layer_types sliding_attention in this architecture": "transformers ignores it",
    r"layer_types has sliding_attention: set sliding_window": (
        "the window is both on and off"
    ),
    r"^rope_\w+ by kind of layer in this architecture": "transformers ignores it",
    r"rope_parameters has an object for each of": (
        "transformers ignores a rope without a kind"
    ),
    r"rope_scaling has the type .* and no rope_type": "transformers 5 ignores it",
    r"rope_scaling and rope_parameters contradict each other": (
        "transformers ignores one"
    ),
    r"^truncate false of rope type yarn in this architecture": (
        "transformers ignores it"
    ),
    r"original_max_position_embeddings is \d+ outside of": (
        "transformers 4 reads it, 5 does not"
    ),
    r"rope_theta is .* which does not say whether": (
        "transformers 4 and 5 read it differently"
    ),
    r"hidden_activation is .*, but hidden_act is": (
        "transformers 4 and 5 read it differently"
    ),
    r"high_freq_factor of rope type llama3": "frequencies would jump",
    r"^mscale_all_dim of rope type": "no released model has it",
    r"^partial_rotary_factor .* in this architecture": (
        "works where no layer is rotated"
    ),
    r"expected an even number of at least 1": "works for three elements only",
    r"^norm_topk_prob true in this architecture": (
        "transformers ignores it, DeepSeek's code does not"
    ),
    r"^mlp_bias true is not supported in a model with experts": (
        "no released model has it"
    ),
}
# Patterns of the errors with which transformers refuses configs that Baton accepts, and
# the reasons why Baton accepts them.
SERVED = {
    r"^KeyError.*for 'rope_type'='longrope': {'original_max": (
        "Phi-3's first files name it su"
    ),
    r"^KeyError.*for 'rope_type'='yarn': {'factor'}": (
        "the ratio of the contexts is meant"
    ),
    r"TypeError.*for \*: 'NoneType' and 'float'": "Mixtral's head_dim can be derived",
    r"^TypeError.*for //: 'int' and 'NoneType'": "no n_group means one group",
    r"^ValueError: Could not find a `sliding_window`": "no layer has a window",
}
_TOLERANCE = 1e-3  # maximum difference of logits with magnitudes of about 1


class Comparison(NamedTuple):
    """The result of a comparison.

    Attributes:
        verdict: "equal", "both refuse", "refused as listed", "served as listed" or
            "disagreement".
        details: the errors, or the largest difference of logits.
    """

    verdict: str
    details: str


def compare(raw: dict[str, Any], folder: Path) -> Comparison:
    """Saves a random model with the config `raw` in `folder`. Compares the logits of a
    prompt in Baton and transformers.
    """
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, 60, (PROMPT_TOKENS,), generator=generator)
    expected, reference_error = _reference_logits(raw, folder, prompt)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        if expected is None:
            load_config(folder)
            return _listed(
                SERVED, reference_error, "served as listed", "transformers refuses it"
            )
        model = load(folder)
    except ModelError as error:
        if expected is None:
            details = f"{error}; transformers: {reference_error}"
            return Comparison("both refuse", details)
        return _listed(
            REFUSALS, str(error), "refused as listed", "transformers serves it"
        )
    with torch.inference_mode():
        attention = DenseAttention(model.attention_spec)
        hidden = model.forward(prompt, torch.arange(len(prompt)), attention)
        logits = model.logits(hidden)
    difference = (logits - expected).abs().max().item()
    verdict = "equal" if difference < _TOLERANCE else "disagreement"
    return Comparison(verdict, f"logits differ by {difference:.2g}")


def _reference_logits(
    raw: dict[str, Any], folder: Path, prompt: torch.Tensor
) -> tuple[torch.Tensor | None, str]:
    """Returns the logits of transformers and "". After an error, returns None and the
    error.
    """
    try:
        reference = make_of(copy.deepcopy(raw), folder)
        with torch.inference_mode():
            logits = reference(prompt[None]).logits[0]
    except Exception as error:  # transformers raises errors of many types
        return None, f"{type(error).__name__}: {error}"
    if not logits.isfinite().all():
        return None, "logits that are not finite"
    return logits, ""


def _listed(
    reasons: dict[str, str], error: str, verdict: str, explanation: str
) -> Comparison:
    """Returns `verdict` if the error is listed in `reasons`, else a disagreement."""
    if any(re.search(pattern, error) for pattern in reasons):
        return Comparison(verdict, error)
    return Comparison("disagreement", f"{error} ({explanation})")
