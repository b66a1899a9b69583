"""Loading of drafters: files written by several tools, and files that do not fit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.config import load_config
from model.drafters.eagle3_config import load_eagle3_config
from model.drafters.load import load_eagle3, load_mtp
from model.drafters.sizes import eagle3_weight_bytes, mtp_weight_bytes
from model.errors import InvalidParallelism, ModelError, ModelLoadError
from model.parallel import Parallel
from tests.model.draft_files import (
    EAGLE3_CONFIG,
    edit_config,
    make_eagle3,
    make_mtp,
    mtp_names,
    save,
)
from tests.model.draft_steps import PROMPT, captured_states, propose
from tests.model.random_models import load, make


@pytest.fixture(scope="module")
def mtp_folders(tmp_path_factory):
    """Directories of models with MTP layers, by kind."""
    folders = {}
    for kind in ("deepseek-v3", "glm4-moe", "qwen3"):
        folders[kind] = tmp_path_factory.mktemp(kind)
        make_mtp(kind, folders[kind])
    return folders


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    """The directory of a model of six layers."""
    folder = tmp_path_factory.mktemp("llama")
    make("LlamaForCausalLM", folder, num_hidden_layers=6)
    return folder


@pytest.fixture(scope="module")
def llama(llama_folder):
    return load(llama_folder)


@pytest.fixture(autouse=True)
def inference_mode():
    with torch.inference_mode():
        yield


def copy_checkpoint(source: Path, target: Path) -> dict[str, Tensor]:
    """Copies a checkpoint of one file. Returns its tensors."""
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    save(tensors, target)
    return tensors


@pytest.mark.parametrize("kind", ["glm4-moe", "qwen3"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"^--speculate mtp: weight .*{}\.self_attn\.q_proj\.weight is mis"),
        ("surplus", r"^--speculate mtp: 1 weights are not used .*{}\.extra\.weight"),
        ("shape", r"^--speculate mtp: weight {}\.self_attn\.o_proj\.weight has shape"),
    ],
)
def test_mtp_weights_that_do_not_fit_are_named(
    kind, change, message, mtp_folders, tmp_path
):
    tensors = copy_checkpoint(mtp_folders[kind], tmp_path)
    layer = mtp_names(kind)["layer"]
    if change == "missing":
        del tensors[f"{layer}.self_attn.q_proj.weight"]
    elif change == "surplus":
        tensors[f"{layer}.extra.weight"] = torch.ones(3)
    else:
        tensors[f"{layer}.self_attn.o_proj.weight"] = torch.ones(3, 3)
    save(tensors, tmp_path)
    model = load(tmp_path)  # the model itself does not need the layer
    with pytest.raises(ModelLoadError, match=message.format(layer)):
        load_mtp(model, tmp_path, dtype=torch.float32)


def test_tables_of_the_mtp_layer_are_used_if_they_differ(mtp_folders, tmp_path):
    kind = "glm4-moe"
    folder = mtp_folders[kind]
    model = load(folder)
    shared = load_mtp(model, folder, dtype=torch.float32)
    tensors = copy_checkpoint(folder, tmp_path)
    prefix = mtp_names(kind)["layer"]
    tensors[f"{prefix}.shared_head.head.weight"] *= 2
    tensors[f"{prefix}.embed_tokens.weight"][:] = 1.0
    save(tensors, tmp_path)
    separate = load_mtp(model, tmp_path, dtype=torch.float32)
    states = torch.randn(4, 64)
    torch.testing.assert_close(
        separate.raw_logits(states), 2 * shared.raw_logits(states)
    )
    # All tokens have the same embedding now, so the proposals do not depend on them.
    captured, _ = captured_states(model, separate.target_layers)
    states = separate.combine(captured)
    first = propose(separate, states, first_token=50)[0]
    assert torch.equal(first, propose(separate, states, first_token=51)[0])


def test_model_without_mtp_layer_is_refused(llama, llama_folder, mtp_folders, tmp_path):
    message = r"^--speculate mtp: this model has no MTP layer .*; leave the option out"
    with pytest.raises(ModelLoadError, match=message):
        load_mtp(llama, llama_folder, dtype=torch.float32)
    with pytest.raises(ModelLoadError, match=message):
        load_mtp(llama, llama_folder, dtype=torch.float32, load_format="dummy")
    tensors = copy_checkpoint(mtp_folders["glm4-moe"], tmp_path)
    prefix = f"{mtp_names('glm4-moe')['layer']}."
    save({n: t for n, t in tensors.items() if not n.startswith(prefix)}, tmp_path)
    model = load(tmp_path)
    message = r"has num_nextn_predict_layers 1, but the files have neither model\.laye"
    with pytest.raises(ModelLoadError, match=message):
        load_mtp(model, tmp_path, dtype=torch.float32)


def test_drafters_have_dummy_weights(mtp_folders, llama, tmp_path):
    (tmp_path / "config.json").write_text(
        (mtp_folders["deepseek-v3"] / "config.json").read_text()
    )
    options = {"dtype": torch.float32, "load_format": "dummy", "seed": 3}
    model = load(tmp_path, load_format="dummy")
    draft = load_mtp(model, tmp_path, **options)
    captured, _ = captured_states(model, draft.target_layers)
    assert propose(draft, draft.combine(captured), 50)[-1].isfinite().all()
    make_eagle3(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    draft = load_eagle3(llama, tmp_path, **options)
    captured, _ = captured_states(llama, draft.target_layers)
    logits = propose(draft, draft.combine(captured), 50)[-1]
    assert logits[:, :40].isfinite().all() and logits[:, 40:].isinf().all()


def test_eagle3_of_other_writers_is_the_same_drafter(llama, tmp_path):
    """Some writers nest the sizes, name the layer `layers.0`, or prefix names by
    `model.`.
    """
    tensors = make_eagle3(tmp_path / "plain", norm_before_residual=True)
    nested = tmp_path / "nested"
    make_eagle3(nested)
    layer_keys = EAGLE3_CONFIG.keys() - {"architectures", "draft_vocab_size"}
    (nested / "config.json").unlink()
    save(
        {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()},
        nested,
    )
    config = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": 40,
        "transformer_layer_config": {key: EAGLE3_CONFIG[key] for key in layer_keys},
    }
    (nested / "config.json").write_text("{}")
    edit_config(nested, **config)
    prefixed = tmp_path / "prefixed"
    make_eagle3(prefixed, norm_before_residual=True)
    edit_config(prefixed, architectures=["Eagle3LlamaForCausalLM"])
    save({f"model.{name}": tensor for name, tensor in tensors.items()}, prefixed)
    states = torch.randn(len(PROMPT), 64)
    results = [
        propose(load_eagle3(llama, folder, dtype=torch.float32), states, 50)[-1]
        for folder in (tmp_path / "plain", nested, prefixed)
    ]
    # The offset of a weight in its file may change the last bits of a product.
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}, (2, 3, 5)),
        # A list that begins with 1 counts layers from 0 and refers to their outputs.
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, (2, 4, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, (2, 3, 5)),
        ({"aux_hidden_state_layer_ids": [0, 3, 6]}, (0, 3, 6)),
    ],
)
def test_target_layers_follow_the_config(changes, layers, llama, tmp_path):
    make_eagle3(tmp_path)
    edit_config(tmp_path, **changes)
    assert load_eagle3_config(tmp_path, llama.config).target_layers == layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 140}, "its vocab_size is 140, but that of the model is 131"),
        ({"hidden_size": 32}, "its hidden_size is 32, but .* of the model is 64"),
        ({"target_hidden_size": 48}, "its target_hidden_size is 48, but .* is 64"),
        ({"draft_vocab_size": 150}, "draft_vocab_size is 150, above vocab_size 131"),
        (
            {"draft_vocab_size": 30},
            r"lm_head\.weight has shape \(40, 64\) .*\(30, 64\)",
        ),
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"architectures .* of a drafter is n",
        ),
        ({"model_type": "gemma3"}, 'model_type "gemma3" of a drafter is not supported'),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 of a drafter is not supported"),
        ({"intermediate_size": 90}, r"mlp\.gate_proj\.weight has shape .*\(90, 64\)"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]},
            r"states after the model's layers \[2, 18, 33\] .* the model has 6 layers",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, "expected 3 integers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state fal"),
        ({"eagle_config": 3}, "config.json has a value of a wrong kind"),
        ({"norm_before_fc": True}, r"weight input_norm\.weight is missing"),
    ],
)
def test_eagle3_that_does_not_fit_is_refused_by_name(changes, message, llama, tmp_path):
    make_eagle3(tmp_path)
    edit_config(tmp_path, **changes)
    pattern = f"^--speculate eagle3:{tmp_path}: .*{message}"
    with pytest.raises(ModelError, match=pattern) as raised:
        load_eagle3(llama, tmp_path, dtype=torch.float32)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": None}, r"its files have no lm_head\.weight"),
        ({"d2t": None}, "its files have no d2t"),
        ({"d2t": torch.full((40,), 120)}, "d2t maps to tokens 120 to 159, but .* 131"),
        ({"d2t": -torch.arange(40)}, "d2t maps two tokens to the same token"),
        (
            {"midlayer.hidden_norm.weight": None},
            r"weight midlayer\.hidden_norm\.weight is missing",
        ),
        ({"extra.weight": torch.ones(2)}, r"1 weights are not used .*extra\.weight"),
    ],
)
def test_eagle3_weights_that_do_not_fit_are_named(change, message, llama, tmp_path):
    tensors = {**make_eagle3(tmp_path), **change}
    save({n: t for n, t in tensors.items() if t is not None}, tmp_path)
    with pytest.raises(ModelLoadError, match=f"^--speculate eagle3:.*: {message}"):
        load_eagle3(llama, tmp_path, dtype=torch.float32)


def test_missing_checkpoint_of_a_drafter_is_refused(llama, tmp_path):
    for folder, problem in (
        (tmp_path / "absent", "is not a directory"),
        (tmp_path, "has no config.json"),
    ):
        with pytest.raises(ModelLoadError, match=f"eagle3:.* {problem}; give the dire"):
            load_eagle3(llama, folder, dtype=torch.float32)


def test_eagle3_that_the_ranks_cannot_share_is_refused(llama, tmp_path, monkeypatch):
    make_eagle3(tmp_path, num_attention_heads=6, num_key_value_heads=3)
    monkeypatch.setattr(llama, "parallel", Parallel(0, 4))
    message = "^--speculate eagle3:.*: --tp 4 does not divide .* 6 query heads"
    with pytest.raises(InvalidParallelism, match=message):
        load_eagle3(llama, tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["deepseek-v3", "glm4-moe", "qwen3"])
def test_memory_of_an_mtp_layer_is_that_of_its_matrices(kind, mtp_folders):
    folder = mtp_folders[kind]
    prefix = "mtp." if kind == "qwen3" else f"{mtp_names(kind)['layer']}."
    tables = (".embed_tokens.weight", ".shared_head.head.weight")
    expected = sum(
        tensor.nbytes
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith(prefix) and not name.endswith(tables) and tensor.dim() > 1
    )
    size = mtp_weight_bytes(load_config(folder), 4, keep_quantised=True)
    assert size == expected


@pytest.mark.parametrize("has_embedding", [False, True])
def test_memory_of_eagle3_is_that_of_its_matrices(has_embedding, llama, tmp_path):
    tensors = make_eagle3(tmp_path, has_embedding=has_embedding)
    config = load_eagle3_config(tmp_path, llama.config)
    expected = sum(tensor.nbytes for tensor in tensors.values() if tensor.dim() > 1)
    assert expected == eagle3_weight_bytes(
        config, 4, keep_quantised=True, has_embedding=has_embedding
    )
