"""Loading of weights: sharded files, memory mapping, unused, missing and dummy
weights.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.architectures.quantization import Quantization
from model.config import load_config, parse_config
from model.decoder import load_model
from model.errors import ModelLoadError
from model.files.safetensors_files import read_headers, stored_elements
from model.parallel import Parallel
from model.quantization.stored import StoredWeights
from model.sizes import fingerprint
from model.weights import DummySource, Upload, WeightLoader
from tests.model.dense import greedy
from tests.model.random_models import load, make
from tests.model.test_config import DEEPSEEK, LLAMA


@pytest.fixture
def checkpoint(tmp_path):
    make("LlamaForCausalLM", tmp_path)
    return tmp_path


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_sharded_checkpoint_is_the_same_model(checkpoint, tmp_path_factory):
    sharded = tmp_path_factory.mktemp("sharded")
    make("LlamaForCausalLM", sharded, shard="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert greedy(load(sharded), [1, 2, 3], 10) == greedy(
        load(checkpoint), [1, 2, 3], 10
    )
    config = load_config(checkpoint)
    assert fingerprint(config, sharded) == fingerprint(config, checkpoint)
    first, *_, last = sorted(sharded.glob("*.safetensors"))
    # If two files have a tensor with the same name, the index decides which tensor is
    # used.
    duplicates = {name: tensor + 1 for name, tensor in load_file(first).items()}
    save_file({**load_file(last), **duplicates}, last)
    assert fingerprint(config, sharded) == fingerprint(config, checkpoint)


def test_weights_of_the_right_dtype_stay_mapped(checkpoint):
    name = "model.layers.0.mlp.up_proj.weight"
    shape = (96, 64)
    loader = WeightLoader(
        StoredWeights(read_headers(checkpoint)), dtype=torch.float32, device="cpu"
    )
    matrix = loader.load(name, shape)
    rows = loader.load(name, shape, rows=range(48, 96))
    columns = loader.load(name, shape, cols=range(32))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    file_ranges = [
        line[0].split("-") for line in maps if line[-1].startswith(str(checkpoint))
    ]
    for tensor in (matrix, rows):
        assert any(
            int(start, 16) <= tensor.data_ptr() < int(stop, 16)
            for start, stop in file_ranges
        )
    assert columns.is_contiguous() and torch.equal(columns, matrix[:, :32])


SHAPES = {
    "flat": (3, 1_400_001),
    "experts": (3, 700, 1000),
    "columns": (5000, 2048),
    "columns of experts": (3, 1700, 2048),
    "small": (7,),
}


def check_upload(folder, device, shape):
    """Checks uploads of tensors that are cut into more parts than there are buffers."""
    tensors = {f"w{n}": torch.randn(shape, dtype=torch.bfloat16) for n in range(6)}
    save_file(tensors, folder / "model.safetensors")
    source = StoredWeights(read_headers(folder))
    upload = Upload(torch.device(device), copies=True)
    cols = slice(512, 1536) if shape[-1] == 2048 else slice(None)
    uploaded = [
        upload(source.part(name, shape, range(shape[0]), None)[..., cols])
        for name in tensors
    ]
    for tensor, expected in zip(uploaded, tensors.values(), strict=True):
        assert tensor.device.type == device
        assert torch.equal(tensor.cpu(), expected[..., cols])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_uploaded_tensors_equal_those_in_the_file(tmp_path, shape):
    check_upload(tmp_path, "cpu", shape)


def test_upload_does_not_copy_tensors_that_are_already_on_the_device():
    """Words of 4-bit codes are uploaded, unpacked, and then passed to the upload
    again.
    """
    upload = Upload(torch.device("meta"), copies=True)
    tensor = upload(torch.ones(1 << 22, dtype=torch.uint8))
    assert tensor.is_meta and upload(tensor) is tensor


def test_failed_copies_return_their_buffers(monkeypatch):
    upload = Upload(torch.device("cpu"), copies=True)
    data = torch.ones(1 << 22)
    with monkeypatch.context() as patch:
        patch.setattr("numpy.copyto", lambda *_: 1 / 0)
        for _ in range(20):
            with pytest.raises(ZeroDivisionError):
                upload(data)
    assert torch.equal(upload(data), data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.1.mlp.up_proj.weight": None},
            r"1\.mlp\.up_proj\.weight is missing",
        ),
        (
            {"model.norm.weight": torch.ones(65)},
            r"norm\.weight has shape \(65,\).*\(64,\)",
        ),
        (
            {"model.norm.weight": torch.ones(64).int()},
            r"norm\.weight has dtype I32; supported: F6",
        ),
        (
            {"model.extra.weight": torch.ones(3)},
            r"1 weights are not used.*model\.extra\.weight",
        ),
    ],
    ids=["missing", "of another shape", "of another dtype", "unused"],
)
def test_weights_that_do_not_fit_are_named(checkpoint, change, message):
    tensors = load_file(checkpoint / "model.safetensors") | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=message):
        load(checkpoint)


@pytest.mark.parametrize("ep", [1, 2])
def test_loading_a_rank_reports_all_weights_of_the_files(tmp_path, ep):
    """Experts that other ranks load are reported too.

    The remaining time is estimated from the share of reported weights.
    """
    make("MixtralForCausalLM", tmp_path)
    reported = set()
    load(tmp_path, parallel=Parallel(1, 2, ep=ep), on_load=reported.add)
    assert reported == set(read_headers(tmp_path))


def test_saved_rope_buffers_are_ignored(checkpoint):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    expected = greedy(load(checkpoint), [3, 4, 5, 6], 8)
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert greedy(load(checkpoint), [3, 4, 5, 6], 8) == expected


def test_stored_head_is_used_although_the_config_ties_it(checkpoint):
    """A fine-tuned head may have an old config. transformers 5 also uses this head."""
    expected = greedy(load(checkpoint), [1, 2, 3], 10)
    raw = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(
        json.dumps({**raw, "tie_word_embeddings": True})
    )
    assert load_config(checkpoint).tie_embeddings
    assert greedy(load(checkpoint), [1, 2, 3], 10) == expected


def test_text_part_of_an_image_model_is_loaded_under_both_prefixes(tmp_path):
    make("Gemma3ForConditionalGeneration", tmp_path, sliding_window=8, head_dim=16)
    expected = greedy(load(tmp_path), [3, 9, 27], 4)

    def rename(tensors):
        for name in list(tensors):
            new = name.replace("language_model.model.", "model.language_model.")
            tensors[new.removeprefix("language_model.")] = tensors.pop(name)

    rewrite(tmp_path, rename)
    assert "model.layers.0.mlp.up_proj.weight" in read_headers(tmp_path)
    assert greedy(load(tmp_path), [3, 9, 27], 4) == expected


def test_directory_with_missing_files_is_refused(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    message = (
        r"neither model\.safetensors nor .*; weights in other files are not read: "
        "convert them with save_pretrained"
    )
    with pytest.raises(ModelLoadError, match=message):
        load(checkpoint)
    for invalid_index in (
        "{",
        "[]",
        '{"weight_map": 1}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
    ):
        (checkpoint / "model.safetensors.index.json").write_text(invalid_index)
        with pytest.raises(ModelLoadError, match="is not an index of weights"):
            load(checkpoint)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00002\.safetensors"):
        load(checkpoint)


def test_truncated_file_is_refused_with_both_lengths(checkpoint):
    path = checkpoint / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    message = f"{path} has {size - 1} of {size} bytes"
    for read in (load, read_headers):
        with pytest.raises(ModelLoadError, match=message):
            read(checkpoint)


@pytest.mark.parametrize("offsets", [(-256, 0), (256, 0)])
def test_tensor_with_invalid_offsets_is_refused(checkpoint, offsets):
    path = checkpoint / "model.safetensors"
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    header["model.norm.weight"]["data_offsets"] = offsets
    text = json.dumps(header).encode()
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + path.read_bytes()[8 + size :]
    )
    with pytest.raises(ModelLoadError, match="is not a safetensors file"):
        fingerprint(load_config(checkpoint), checkpoint)
        load(checkpoint)


def test_dummy_weights_depend_on_name_and_seed_only(tmp_path):
    def ids(raw, seed=0):
        options = {"dtype": torch.float32, "load_format": "dummy", "seed": seed}
        return greedy(load_model(parse_config(raw), tmp_path, **options), [1, 2, 3], 12)

    assert ids(LLAMA) == ids(LLAMA) != ids(LLAMA, seed=1)
    assert len(ids(DEEPSEEK)) == 12


def test_part_of_a_dummy_weight_equals_that_part_of_the_complete_weight(monkeypatch):
    source = DummySource(7, "cpu")
    shape = (60, 40)
    matrix = source.part("w", shape, range(60), None)
    assert torch.equal(source.part("w", shape, range(20, 40), None), matrix[20:40])
    assert torch.equal(
        source.part("w", shape, range(60), range(10, 20)), matrix[:, 10:20]
    )
    # Chunks are so small that a weight has many of them.
    monkeypatch.setattr("model.weights._HASH_CHUNK", 64)
    assert torch.equal(source.part("w", shape, range(60), None), matrix)
    assert abs(matrix.mean()) < 0.01 and abs(matrix.var() * 40 - 1) < 0.1
    assert not torch.equal(source.part("v", shape, range(60), None), matrix)


def test_fingerprints_of_different_models_differ(checkpoint, tmp_path_factory):
    config = load_config(checkpoint)
    before = fingerprint(config, checkpoint)
    assert fingerprint(config, checkpoint) == before
    theta = parse_config({**LLAMA, "rope_theta": 5e5})
    assert fingerprint(theta, checkpoint) != before
    rewrite(
        checkpoint,
        lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].mul_(1.01),
    )
    assert fingerprint(config, checkpoint) != before
    dummies = {
        fingerprint(config, checkpoint, load_format="dummy", seed=s) for s in (0, 0, 1)
    }
    assert len(dummies) == 2


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_fingerprint_changes_with_the_row_of_a_single_token(checkpoint, name):
    config = load_config(checkpoint)
    fingerprints = {fingerprint(config, checkpoint)}
    for row in range(config.vocab_size):
        rewrite(checkpoint, lambda tensors, row=row: tensors[name][row].mul_(1.01))
        fingerprints.add(fingerprint(config, checkpoint))
    assert len(fingerprints) == config.vocab_size + 1


def test_stored_dtypes_are_counted_from_headers(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    total = sum(tensor.numel() for tensor in tensors.values())
    assert stored_elements(checkpoint) == {"F32": total}


def test_dummy_mxfp4_experts_are_quantised_and_equal_in_every_part():
    """The variance is about 1 / columns, so that products do not change the magnitude
    of activations.
    """
    source = DummySource(7, "cpu", Quantization("mxfp4"))
    shape = (4, 96, 256)
    whole = source.quantised("experts.down_proj", shape, range(4), None)
    assert whole is not None and whole.kind == "fp4"
    numbers = whole.dequantise()
    assert numbers.shape == shape
    assert 0.5 < 256 * numbers.square().mean().item() < 2
    part = source.quantised("experts.down_proj", shape, range(2, 3), range(64, 192))
    assert part is not None
    assert torch.equal(part.dequantise(), numbers[2:3, :, 64:192])
    assert (
        source.quantised("self_attn.q_proj.weight", (96, 256), range(96), None) is None
    )
