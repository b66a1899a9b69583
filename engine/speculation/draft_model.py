"""A draft model: a smaller model of the same vocabulary that proposes tokens.

This module reads and checks the files of a draft model, without torch, before any
engine process starts. The draft model runs on the ranks of the engine, with the
engine's options except those that describe the files and the KV of the engine's own
model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from engine.config import EngineConfig
from engine.geometry import check_attention, check_weights, kv_groups
from engine.text.tokenizer import NO_TEMPLATE, Tokenizer
from model.config import ModelConfig, load_config
from model.sizes import check_parallelism


class DraftModelError(ValueError):
    """The engine cannot use a draft model. The message names the draft model, the
    reason and the fix."""


class DraftModelSpec(NamedTuple):
    """A draft model and how it is served.

    Attributes:
        config: the engine's configuration, changed for the draft model.
        blocks_per_block: number of the draft model's blocks that hold the tokens of one
            block of the engine's block tables. More than 1 only with --dcp: a block of
            a table then has tokens of several ranks, but the draft model stores all
            tokens on every rank.
        max_proposals: the largest number of tokens to propose for a sequence.
        name: the kind of drafter in --speculate and a description of the drafter, for
            messages.
    """

    config: EngineConfig
    model_config: ModelConfig
    blocks_per_block: int
    max_proposals: int
    name: str

    @property
    def max_len(self) -> int:
        """The largest number of tokens of a sequence of the draft model."""
        return self.config.max_model_len or self.model_config.max_position


def requested_draft_model(
    config: EngineConfig, target: ModelConfig
) -> DraftModelSpec | None:
    """Returns the draft model that --speculate names; None if it names none, or if the
    server does not decode.

    Raises:
        DraftModelError: the engine cannot use the draft model.
    """
    speculation = config.speculation
    if speculation.kind != "model" or config.role == "prefill":
        return None
    return read_draft_model(
        config, target, speculation.folder, speculation.max_proposals
    )


def read_draft_model(
    config: EngineConfig, target: ModelConfig, folder: str, max_proposals: int
) -> DraftModelSpec:
    """Reads a draft model's config.json and checks that the ranks of the engine can
    serve it.

    Args:
        config: the engine's configuration.
        target: the model that the engine serves.
        folder: the directory of the draft model.
        max_proposals: the largest number of tokens to propose for a sequence.

    Raises:
        DraftModelError: the engine cannot use the draft model.
    """
    if not Path(folder).is_dir():
        raise DraftModelError(
            f"--speculate model: {folder} is not a directory: name the directory of a "
            "checkpoint"
        )
    name = f"model: the draft model {folder}"
    with naming_draft_model(name):
        model_config = load_config(folder, max_model_len=config.max_model_len)
        max_len = config.max_model_len or target.max_position
        draft_config = config.model_copy(
            update={
                "model_dir": folder,
                "max_model_len": min(max_len, model_config.max_position),
                "quantization": None,
                "hf_overrides": None,
                "kv_cache_dtype": "auto",
                "scales": (),
                "dcp": 1,
                "ep": 1,
            }
        )
        check_parallelism(model_config, config.tp)
        check_attention(draft_config, model_config)
        check_windows(target, config.model_dir, "model")
    return DraftModelSpec(draft_config, model_config, config.dcp, max_proposals, name)


def check_requested_draft_model(config: EngineConfig, target: ModelConfig) -> None:
    """Checks the draft model that --speculate names, if it names one, before any engine
    process starts.

    Raises:
        DraftModelError: the engine cannot use the draft model.
    """
    draft = requested_draft_model(config, target)
    if draft is not None:
        check_draft_model(draft, target, config.model_dir)


def check_draft_model(
    draft: DraftModelSpec, target: ModelConfig, target_folder: str
) -> None:
    """Checks the files of a draft model: its weights, and that equal token ids have
    equal texts in both models.

    Raises:
        DraftModelError: the files are incomplete, or the vocabularies differ.
    """
    folder = draft.config.model_dir
    with naming_draft_model(draft.name):
        check_weights(draft.config, draft.model_config)
    if not (Path(folder) / "tokenizer.json").is_file():
        vocab_size = draft.model_config.vocab_size
        if vocab_size != target.vocab_size:
            raise DraftModelError(
                f"--speculate model: {folder} has no tokenizer.json, and its "
                f"vocab_size of {vocab_size} differs from the {target.vocab_size} of "
                f"{target_folder}: use a draft model with the vocabulary of the model"
            )
        return
    _check_vocabulary(folder, target_folder)


@contextmanager
def naming_draft_model(name: str) -> Iterator[None]:
    """Adds --speculate and the name of a draft model to the messages of errors that do
    not name this option."""
    try:
        yield
    except DraftModelError:
        raise
    except ValueError as error:
        if str(error).startswith("--speculate "):
            raise
        raise DraftModelError(
            f"--speculate {name} cannot be served: {error}"
        ) from error


def check_windows(target: ModelConfig, target_folder: str, kind: str) -> None:
    """Raises DraftModelError if all layers of the engine's model have windows, because
    the engine then drops blocks that a draft model needs.

    Args:
        kind: the draft model's kind in --speculate.
    """
    groups, _ = kv_groups(target)
    if None not in groups.windows:
        windows = " or ".join(str(window) for window in groups.windows)
        raise DraftModelError(
            f"--speculate {kind}: all layers of {target_folder} see only {windows} "
            "tokens, so the engine drops blocks that a draft model would need: use "
            "--speculate ngram"
        )


def _check_vocabulary(folder: str, target_folder: str) -> None:
    """Raises DraftModelError if a token id has different texts in the two models.

    One vocabulary may be longer than the other one. Models of one family often differ
    in the numbers of reserved tokens and of embedding rows without a token.
    """
    texts = [_texts_by_id(name) for name in (folder, target_folder)]
    for token_id in sorted(texts[0].keys() & texts[1].keys()):
        text, target_text = (by_id[token_id] for by_id in texts)
        if text != target_text:
            raise DraftModelError(
                f"--speculate model: {folder} has a different vocabulary from "
                f"{target_folder}: token {token_id} is {text!r}, not {target_text!r}; "
                "use a draft model with the vocabulary of the model"
            )


def _texts_by_id(folder: str) -> dict[int, str]:
    tokenizer = Tokenizer(folder, NO_TEMPLATE)
    vocabulary: dict[str, int] = tokenizer.library.get_vocab(with_added_tokens=True)
    return {token_id: text for text, token_id in vocabulary.items()}
