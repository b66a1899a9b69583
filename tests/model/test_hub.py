"""Resolving model names: local paths, hub ids, the default model, and errors."""

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from model.config import load_config
from model.errors import ModelNotAvailable
from model.hub import DEFAULT_MODEL, build_once, resolve_model


@pytest.mark.parametrize(
    "name", ["./nothing-here", "/no/such/dir", "no-owner", "a/b/c"]
)
def test_name_that_is_neither_a_path_nor_a_hub_id_is_refused(name):
    with pytest.raises(ModelNotAvailable, match=r"no such directory.*hub id"):
        resolve_model(name)


def test_file_and_needless_revision_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelNotAvailable, match=r"is a file.*give the model's folder"):
        resolve_model(str(file))
    for name in (str(tmp_path), DEFAULT_MODEL):
        with pytest.raises(
            ModelNotAvailable, match=r"revision is 'v2'.*leave --revision out"
        ):
            resolve_model(name, "v2")


def test_hub_download_uses_revision_and_token_and_errors_hide_the_token(
    monkeypatch, tmp_path
):
    request = {}

    def snapshot_download(name, **options):
        request.update(options, name=name)
        if name == "owner/none":
            raise OSError("offline")
        with options["tqdm_class"](total=4 << 30, unit="B") as bar:
            bar.update(1 << 30)
            bar.refresh()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setenv("HF_TOKEN", "very-secret")
    progress_lines = []
    assert resolve_model("owner/name", "v2", progress=progress_lines.append) == tmp_path
    assert progress_lines[0].startswith("downloading: 1.00 of 4.00 GiB, about ")
    assert request["name"] == "owner/name"
    assert request["revision"] == "v2"
    assert request["token"] == "very-secret"
    assert "*.safetensors" in request["allow_patterns"]
    assert "original/*" in request["ignore_patterns"]
    message = r"owner/none' at revision 'v2'.*HF_TOKEN"
    with pytest.raises(ModelNotAvailable, match=message) as error:
        resolve_model("owner/none", "v2")
    assert "very-secret" not in str(error.value)


_RESOLVE_WITH_SHORT_TIMEOUT = """
from model import hub
from model.errors import ModelNotAvailable
hub._HUB_TIMEOUT_S = 0.2
try:
    hub.resolve_model("owner/name")
except ModelNotAvailable as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("accepts", "reason"), [(False, "refused"), (True, "timed out")]
)
def test_unreachable_or_silent_hub_is_reported_in_one_line(accepts, reason, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if accepts:
            listener.listen()
        port = listener.getsockname()[1]
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", _RESOLVE_WITH_SHORT_TIMEOUT],
            env={**os.environ, **env}, capture_output=True, text=True, timeout=120,
            check=True,
        )  # fmt: skip
    assert re.fullmatch(
        rf"model 'owner/name' .* HF_TOKEN\): \w+: .*{reason}\n", done.stdout
    )
    assert done.stderr == ""


def count_build(target: str, log: str) -> None:
    def build(scratch: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        (scratch / "file").write_text("whole")

    assert (build_once(Path(target), "key", build) / "file").read_text() == "whole"


def test_concurrent_processes_build_a_directory_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "cache" / "made"), str(tmp_path / "log"))
    processes = [context.Process(target=count_build, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == "built\n"


def test_failed_build_leaves_nothing_and_another_key_rebuilds(tmp_path):
    target = tmp_path / "made"

    def fail(scratch: Path) -> None:
        (scratch / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(target, "1", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".made.lock"]
    build_once(target, "1", lambda scratch: (scratch / "one").touch())
    build_once(target, "1", fail)
    build_once(target, "2", lambda scratch: (scratch / "two").touch())
    assert sorted(os.listdir(target)) == ["baton.json", "two"]


def test_default_model_is_converted_with_tokenizer_template_and_end_token():
    try:
        folder = resolve_model(DEFAULT_MODEL)
    except ModelNotAvailable as error:
        pytest.skip(str(error))
    assert resolve_model(DEFAULT_MODEL, progress=pytest.fail) == folder
    config = load_config(folder)
    assert (config.num_layers, config.vocab_size, config.rope.theta) == (30, 49152, 1e5)
    assert config.rms_eps == 1e-5 and config.tie_embeddings
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == end
    text = "<|im_start|>user\nÜber 12345 don't  🙂\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    digits = [tokenizer.token_to_id(digit) for digit in "12345"]
    assert any(ids[at : at + 5] == digits for at in range(len(ids))), (
        "a digit is not a token of its own"
    )
    template = json.loads((folder / "tokenizer_config.json").read_text())[
        "chat_template"
    ]
    assert "<|im_start|>assistant" in template
