"""MTP layers and EAGLE-3 drafters that an engine cannot use are refused at start."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.speculation.draft_model import DraftModelSpec
from engine.speculation.states.state_model import requested_state_model
from model.config import load_config
from tests.make_drafters import ensure_drafter
from tests.make_models import ensure_model
from tests.rigs.engines import make_config


def _request(model: Path, speculate: str, **options: Any) -> DraftModelSpec | None:
    config = make_config(
        model_dir=str(model), speculate=speculate, **{"role": "decode", **options}
    )
    return requested_state_model(config, load_config(model))


def _changed(folder: Path, **changes: Any) -> Path:
    """Copy the trained EAGLE-3 drafter, with changes of its config.json."""
    shutil.copytree(ensure_drafter("eagle3-gqa"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_drafter_has_one_layer_and_the_positions_of_the_model() -> None:
    folder = ensure_drafter("eagle3-gqa")
    draft = _request(ensure_model("gqa"), f"eagle3:{folder}:4", max_model_len=99)
    assert draft is not None
    assert (draft.model_config.num_layers, draft.max_proposals) == (1, 4)
    assert draft.max_len == 99
    draft = _request(ensure_drafter("mtp-mla"), "mtp", kv_cache_dtype="float8_e4m3fn")
    assert draft is not None
    assert draft.model_config.max_position == draft.max_len
    assert draft.config.kv_dtype == "float32"


def test_prefill_server_has_the_drafter_too() -> None:
    assert _request(ensure_drafter("mtp-gqa"), "mtp", role="prefill") is not None


def test_other_drafters_read_no_states() -> None:
    assert _request(ensure_model("gqa"), "ngram:4") is None
    assert _request(ensure_model("gqa"), "off") is None


def _refusal(model: Path, speculate: str, **options: Any) -> str:
    with pytest.raises(ValueError) as raised:
        _request(model, speculate, **options)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(f"--speculate {speculate.partition(':')[0]}")
    return message


def test_model_without_mtp_layer_is_refused() -> None:
    message = _refusal(ensure_model("gqa"), "mtp:2")
    assert "this model has no MTP layer" in message
    assert message.endswith("leave the option out, or use another drafter")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 32}, "its hidden_size is 32"),
        ({"vocab_size": 600}, "its vocab_size is 600"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ],
)
def test_eagle3_of_another_model_is_refused(tmp_path, changes, reason) -> None:
    folder = _changed(tmp_path / "drafter", **changes)
    assert reason in _refusal(ensure_model("gqa"), f"eagle3:{folder}:4")


def test_missing_eagle3_checkpoint_is_refused() -> None:
    message = _refusal(ensure_model("gqa"), "eagle3:no/such/folder:4")
    assert "no/such/folder is not a directory; give the directory of" in message


def test_ranks_that_cannot_serve_a_drafter_are_refused() -> None:
    folder = ensure_drafter("eagle3-gqa")
    message = _refusal(ensure_model("gqa"), f"eagle3:{folder}:4", tp=2, dcp=2)
    assert "--dcp 2: use --dcp 1, or --speculate ngram:4" in message
    message = _refusal(ensure_model("gqa"), f"eagle3:{folder}:4", tp=16)
    assert f"eagle3: the drafter {folder} cannot be served: --tp 16" in message


def test_model_that_drops_all_blocks_is_refused(tmp_path) -> None:
    config = json.loads((ensure_model("gqa") / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    config |= {"sliding_window": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = _refusal(tmp_path, f"eagle3:{ensure_drafter('eagle3-gqa')}:4")
    assert "see only 9 tokens" in message and "use --speculate ngram" in message
