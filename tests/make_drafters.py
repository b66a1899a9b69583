"""Tiny drafters for the models of `make_models.py`, trained on the same text.

    python -m tests.make_drafters mtp-mla eagle3-gqa      # prints their directories

`ensure_drafter(kind)` trains on first use, which takes about a minute, and caches the
result like `ensure_model`. A drafter learns the distribution of its target, so most of
its proposals are tokens that the target also draws.
"""

import hashlib
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from model.hub import build_once
from tests import make_models
from tests.make_models import Storyteller, ensure_model
from tests.model import draft_reference

# For each kind: the kind of the target model, and the naming style of the drafter's
# weights.
KINDS = {
    "mtp-mla": ("mla", "nextn"),
    "mtp-gqa": ("gqa", "qwen"),
    "eagle3-gqa": ("gqa", "eagle3"),
}
NUM_STEPS = 140
ROW_TOKENS = 160
_DRAFT_VOCAB_SIZE = 256
_SHARE_OF_PROPOSED_ROWS = 0.3
# The EAGLE-3 drafter reads the target's states after this many layers. Targets have
# two.
_TARGET_LAYERS = [0, 1, 2]
_SOURCES = (__file__, make_models.__file__, draft_reference.__file__)


def ensure_drafter(kind: str) -> Path:
    """Return the directory of a trained drafter (see KINDS).

    For MTP, the directory contains the target with the added MTP layer. For EAGLE-3, it
    contains only the drafter. The drafter is trained if the cache does not have it.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; use one of {', '.join(KINDS)}")
    target = ensure_model(KINDS[kind][0])
    default_root = Path.home() / ".cache" / "baton" / "test-models"
    root = os.environ.get("BATON_TEST_CACHE") or default_root
    digest = hashlib.blake2b(digest_size=8)
    for source in _SOURCES:
        digest.update(Path(source).read_bytes())
    key = digest.hexdigest()
    return build_once(
        Path(root) / f"{kind}-{key}", key, lambda scratch: _train(kind, target, scratch)
    )


def mtp_names(style: str, num_layers: int) -> dict[str, str]:
    """Return the names of an MTP layer's weights by their role.

    Args:
        style: "nextn" for the names of DeepSeek-V3, "qwen" for those of Qwen3-Next.
    """
    names = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    prefix = f"model.layers.{num_layers}"
    roles = {
        "token_norm": f"{prefix}.enorm.weight",
        "state_norm": f"{prefix}.hnorm.weight",
        "projection": f"{prefix}.eh_proj.weight",
        "layer": prefix,
        "norm": f"{prefix}.shared_head.norm.weight",
    }
    if style == "qwen":
        roles = {
            "token_norm": "mtp.pre_fc_norm_embedding.weight",
            "state_norm": "mtp.pre_fc_norm_hidden.weight",
            "projection": "mtp.fc.weight",
            "layer": "mtp.layers.0",
            "norm": "mtp.norm.weight",
        }
    return {**names, **roles}


class _Row(NamedTuple):
    """The tokens of a text, and the states and probabilities that the target computes.

    Attributes:
        states: states[i] is the states after i layers, before the final norm.
        normed: the states after all layers and the final norm.
        probabilities: [T, vocab], the distribution of the next token at each position.
    """

    token_ids: Tensor
    states: list[Tensor]
    normed: Tensor
    probabilities: Tensor


class _Target:
    """A trained target model, which runs in transformers and makes the training data.

    Attributes:
        tensors: the model's weights by their names in its files.
        raw: the model's config.
    """

    def __init__(self, folder: Path) -> None:
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._storyteller = Storyteller(random.Random(1))
        self.tensors = {
            name: tensor.detach().clone()
            for name, tensor in self._model.state_dict().items()
        }
        values = self._model.config.to_dict()
        self.raw = {**values, **(values.get("rope_parameters") or {})}
        self.num_layers: int = values["num_hidden_layers"]
        # transformers returns the last layer's states only after the final norm.
        self._last_states: list[Tensor] = []
        self._model.model.norm.register_forward_pre_hook(
            lambda module, inputs: self._last_states.append(inputs[0][0])
        )

    @torch.no_grad()
    def next_row(self) -> _Row:
        ids: list[int] = []
        while len(ids) < ROW_TOKENS:
            text = self._storyteller.story() + "\n" + self._storyteller.chat()
            ids += self._tokenizer.encode(text)
        token_ids = torch.tensor(ids[:ROW_TOKENS])
        out = self._model(token_ids[None], output_hidden_states=True)
        *states, normed = (state[0] for state in out.hidden_states)
        states.append(self._last_states.pop())
        return _Row(token_ids, states, normed, out.logits[0].softmax(-1))


def _train(kind: str, target_folder: Path, folder: Path) -> None:
    torch.manual_seed(0)
    style = KINDS[kind][1]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices gain little from a second thread
    try:
        # The test that calls this may be in inference mode.
        with torch.inference_mode(False), torch.enable_grad():
            target = _Target(target_folder)
            if style == "eagle3":
                _train_eagle3(target, folder)
            else:
                _train_mtp(target, style, target_folder, folder)
    finally:
        torch.set_num_threads(num_threads)


def _fit(weights: list[Tensor], loss_of_row: Callable[[], Tensor]) -> None:
    for weight in weights:
        weight.requires_grad_(True)
    adam = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(NUM_STEPS):
        schedule = (1 + math.cos(math.pi * step / NUM_STEPS)) / 2
        adam.param_groups[0]["lr"] = 0.004 * schedule * min(1, (step + 1) / 20)
        loss_of_row().backward()
        adam.step()
        adam.zero_grad()
    for weight in weights:
        weight.requires_grad_(False)


# A drafter's forward pass: returns the outputs and the logits of rows, given the token
# ids and states of these rows.
_Formula = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _loss(
    formula: _Formula, token_ids: Tensor, states: Tensor, probabilities: Tensor
) -> Tensor:
    """Return the sum of the losses of two passes over the same rows.

    In the first pass, all states are the target's. In the second pass, the state of
    some rows is the drafter's output for the previous row, as when a drafter proposes
    several tokens.
    """
    outputs, logits = formula(token_ids, states)
    is_proposed = torch.rand(len(states), 1) < _SHARE_OF_PROPOSED_ROWS
    previous_outputs = torch.cat((states[:1], outputs[:-1]))
    mixed_states = torch.where(is_proposed, previous_outputs, states)
    mixed_outputs, mixed_logits = formula(token_ids, mixed_states)
    loss = torch.zeros(())
    for row_logits in (logits, mixed_logits):
        loss = loss - (probabilities * row_logits.log_softmax(-1)).sum(-1).mean()
    for row_outputs in (outputs, mixed_outputs):
        loss = loss + smooth_l1_loss(row_outputs[:-1], states[1:].detach())
    return loss


def _train_mtp(target: _Target, style: str, target_folder: Path, folder: Path) -> None:
    names = mtp_names(style, target.num_layers)
    size = target.raw["hidden_size"]
    layer: dict[str, Tensor] = {}
    last_layer = f"model.layers.{target.num_layers - 1}."
    for name, tensor in target.tensors.items():
        if name.startswith(last_layer):
            layer[f"{names['layer']}.{name.removeprefix(last_layer)}"] = tensor.clone()
    for role in ("token_norm", "state_norm"):
        layer[names[role]] = torch.ones(size)
    layer[names["norm"]] = target.tensors["model.norm.weight"].clone()
    halves = (torch.randn(size, size) * size**-0.5, torch.eye(size))
    layer[names["projection"]] = torch.cat(halves, dim=1)
    tables = {
        "model.embed_tokens.weight": target.tensors["model.embed_tokens.weight"],
        "lm_head.weight": target.tensors["model.embed_tokens.weight"],
    }

    def loss_of_row() -> Tensor:
        row = target.next_row()
        return _loss(
            lambda token_ids, states: draft_reference.mtp(
                token_ids, states, {**layer, **tables}, names, target.raw
            ),
            row.token_ids[1:],
            row.normed[:-1],
            row.probabilities[1:],
        )

    _fit(list(layer.values()), loss_of_row)
    shutil.copytree(target_folder, folder, dirs_exist_ok=True)
    (folder / "baton.json").unlink(missing_ok=True)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **layer}, path, metadata={"format": "pt"})
    if style == "nextn":
        raw = json.loads((folder / "config.json").read_text())
        raw["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(raw, indent=2))


def _train_eagle3(target: _Target, folder: Path) -> None:
    embedding = target.tensors["model.embed_tokens.weight"]
    target_ids = _frequent_tokens(target)
    raw = {
        **target.raw,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(target_ids),
        "eagle_aux_hidden_state_layer_ids": _TARGET_LAYERS,
    }
    layer = _new_eagle3_layer(target)
    layer["lm_head.weight"] = embedding[target_ids].clone()

    def loss_of_row() -> Tensor:
        row = target.next_row()
        captured = torch.cat([row.states[index] for index in _TARGET_LAYERS], dim=-1)
        return _loss(
            lambda token_ids, states: draft_reference.eagle3(
                token_ids, states, layer, raw, embedding
            ),
            row.token_ids[1:],
            captured[:-1] @ layer["fc.weight"].T,
            row.probabilities[1:, target_ids],
        )

    _fit(list(layer.values()), loss_of_row)
    is_drafted = torch.zeros(raw["vocab_size"], dtype=torch.bool)
    is_drafted[target_ids] = True
    maps = {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": is_drafted}
    save_file({**layer, **maps}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw, indent=2))


def _new_eagle3_layer(target: _Target) -> dict[str, Tensor]:
    """Return initial weights. Some are copies of weights of the target's last layer."""
    size = target.raw["hidden_size"]
    last_layer = f"model.layers.{target.num_layers - 1}."
    layer = {
        f"midlayer.{name.removeprefix(last_layer)}": tensor.clone()
        for name, tensor in target.tensors.items()
        if name.startswith(last_layer)
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = layer[f"midlayer.self_attn.{name}.weight"]
        layer[f"midlayer.self_attn.{name}.weight"] = torch.cat((weight, weight), dim=1)
    layer["midlayer.input_layernorm.weight"] = torch.ones(size)
    layer["midlayer.hidden_norm.weight"] = torch.ones(size)
    layer["norm.weight"] = target.tensors["model.norm.weight"].clone()
    noise = torch.randn(size, 2 * size) * (0.1 * size**-0.5)
    layer["fc.weight"] = torch.cat((noise, torch.eye(size)), dim=1)
    return layer


def _frequent_tokens(target: _Target) -> Tensor:
    """Return the ids of the tokens to which the target gives the highest total
    probability, in ascending order.
    """
    counts = torch.zeros(target.raw["vocab_size"])
    for _ in range(50):
        counts += target.next_row().probabilities.sum(0)
    return counts.topk(_DRAFT_VOCAB_SIZE).indices.sort().values


def main() -> None:
    for kind in sys.argv[1:] or KINDS:
        print(ensure_drafter(kind))


if __name__ == "__main__":
    main()
