"""From what a user calls a model to a local directory with its files. No torch here."""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

DEFAULT_MODEL: Final = "SmolLM2-135M-Instruct"

_RESULT: Final = "path: "  # how a conversion process names what it made, on its last line
_PATTERNS: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*", "*.txt")

Progress = Callable[[str], None]


class ModelNotAvailable(ValueError):
    """The model is neither a local directory nor to be had from the hub."""


def cache_dir() -> Path:
    """Where converted models are kept: BATON_CACHE, or ~/.cache/baton."""
    return Path(os.environ.get("BATON_CACHE") or Path.home() / ".cache" / "baton")


def resolve_model(
    name: str, revision: str | None = None, *, progress: Progress | None = None
) -> Path:
    """Returns the local Hugging Face directory of a model, fetching or converting it if needed.

    Args:
        name: a directory, a GGUF file, a directory with one GGUF file and no config.json, a hub
            id, or DEFAULT_MODEL, which comes from an installed package.
        revision: branch, tag or commit on the hub.
        progress: told, in words, what takes long.

    Raises:
        ModelNotAvailable: there is no such model, or the hub does not give it to us.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, progress)
    if path.is_dir():
        return _local_directory(path, progress)
    if name == DEFAULT_MODEL:
        return _run_conversion(["model.default_model"], progress)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelNotAvailable(
            f"model {name!r}: no such directory; give a local directory, a GGUF file, a hub id "
            f"(owner/name) or {DEFAULT_MODEL}"
        )
    return _download(name, revision)


def _local_directory(path: Path, progress: Progress | None) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelNotAvailable(f"{path} holds several GGUF files ({names}): name the one to serve")
    return _converted(files[0], progress) if files else path


def _converted(gguf_file: Path, progress: Progress | None) -> Path:
    stat = gguf_file.stat()
    key = f"{gguf_file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    digest = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
    target = cache_dir() / f"{gguf_file.stem}-{digest}"
    return _run_conversion(["model.gguf", str(gguf_file), str(target)], progress)


def _run_conversion(command: list[str], progress: Progress | None) -> Path:
    # A process of its own: the conversion loads torch, which this process must not.
    argv = [sys.executable, "-m", *command]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = line.strip()
            if progress is not None and not last.startswith(_RESULT):
                progress(last)
        if process.wait() != 0 or not last.startswith(_RESULT):
            errors.seek(0)
            reason = errors.read().strip().rsplit("\n", 1)[-1]
            raise ModelNotAvailable(f"{' '.join(command)} failed: {reason}")
    return Path(last.removeprefix(_RESULT))


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(_PATTERNS),
            token=os.environ.get("HF_TOKEN") or None,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        hint = "check the name, the revision, the network and HF_TOKEN"
        raise ModelNotAvailable(f"model {name!r}{at} is not available ({hint}): {error}") from error
    return Path(folder)
