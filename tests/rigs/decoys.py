"""A user's folder that has files named like modules of Baton, Python and libraries."""

from pathlib import Path

DECOY = "raise SystemExit('this file belongs to the user: ' + __file__)\n"
MODULES = (
    "model protocol attention kvcache benchmarks "
    "json socket random selectors pickle logging queue signal tempfile "
    "torch numpy nixl transformers tokenizers llguidance yaml uvicorn"
).split()
PACKAGES = ("engine", "tests", "pydantic")


def make_decoys(folder: Path) -> None:
    """Fills `folder` with modules and packages whose import ends the program."""
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(DECOY)
    for name in MODULES:
        (folder / f"{name}.py").write_text(DECOY)
