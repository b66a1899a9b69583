"""From a name to a directory: local paths, hub ids, the default model, and clear refusals."""

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
def test_what_is_neither_a_path_nor_a_hub_id_is_refused(name):
    with pytest.raises(ModelNotAvailable, match=r"no such directory.*hub id"):
        resolve_model(name)


def test_what_is_no_folder_or_has_no_revision_is_refused_as_such(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelNotAvailable, match=r"is a file.*give the model's folder"):
        resolve_model(str(file))
    for name in (str(tmp_path), DEFAULT_MODEL):
        with pytest.raises(
            ModelNotAvailable, match=r"revision is 'v2'.*leave --revision out"
        ):
            resolve_model(name, "v2")


def test_a_hub_id_is_fetched_with_revision_and_token_which_no_refusal_shows(
    monkeypatch, tmp_path
):
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        if name == "owner/none":
            raise OSError("offline")
        with options["tqdm_class"](total=4 << 30, unit="B") as bar:
            bar.update(1 << 30)
            bar.refresh()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setenv("HF_TOKEN", "very-secret")
    told = []
    assert resolve_model("owner/name", "v2", progress=told.append) == tmp_path
    assert told[0].startswith("downloading: 1.00 of 4.00 GiB, about ")
    assert (asked["name"], asked["revision"], asked["token"]) == (
        "owner/name",
        "v2",
        "very-secret",
    )
    assert (
        "*.safetensors" in asked["allow_patterns"]
        and "original/*" in asked["ignore_patterns"]
    )
    told = r"owner/none' at revision 'v2'.*HF_TOKEN"
    with pytest.raises(ModelNotAvailable, match=told) as failed:
        resolve_model("owner/none", "v2")
    assert "very-secret" not in str(failed.value)


_ASK = """
from model import hub
from model.errors import ModelNotAvailable
hub._HUB_TIMEOUT_S = 0.2
try:
    hub.resolve_model("owner/name")
except ModelNotAvailable as error:
    print(error)
"""


@pytest.mark.parametrize(("accepts", "told"), [(False, "refused"), (True, "timed out")])
def test_a_hub_that_cannot_be_reached_or_is_silent_is_told_in_one_line(
    accepts, told, tmp_path
):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if accepts:
            listener.listen()
        port = listener.getsockname()[1]
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", _ASK], env={**os.environ, **env}, capture_output=True, text=True,
            timeout=120, check=True,
        )  # fmt: skip
    assert re.fullmatch(
        rf"model 'owner/name' .* HF_TOKEN\): \w+: .*{told}\n", done.stdout
    )
    assert done.stderr == ""


def count_build(target: str, log: str) -> None:
    def build(scratch: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        (scratch / "file").write_text("whole")

    assert (build_once(Path(target), "key", build) / "file").read_text() == "whole"


def test_processes_that_ask_at_once_build_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "cache" / "made"), str(tmp_path / "log"))
    processes = [context.Process(target=count_build, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_build_that_fails_leaves_nothing_and_another_key_builds_anew(tmp_path):
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


def test_the_default_model_is_converted_with_tokenizer_template_and_end_of_text():
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
        "digits stand alone"
    )
    template = json.loads((folder / "tokenizer_config.json").read_text())[
        "chat_template"
    ]
    assert "<|im_start|>assistant" in template
