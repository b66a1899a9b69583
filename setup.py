"""Which packages an installation has, and where; pyproject.toml has everything else.

The folders of the repository become packages inside `baton_pd`, so that an installed
Baton adds one name to an environment (baton_pd/__init__.py).
"""

from pathlib import Path

from setuptools import find_packages, setup

NAME = "baton_pd"
FOLDERS = (
    "protocol",
    "kvcache",
    "attention",
    "model",
    "engine",
    "prefill_server",
    "decode_server",
    "proxy",
    "deploy",
    "benchmarks",
)
packages = find_packages(include=[*FOLDERS, *(f"{folder}.*" for folder in FOLDERS)])
if Path("examples").is_dir():  # an image installs the dependencies before it has them
    packages.append("examples")  # programs of users, not a package

setup(
    packages=[NAME, *(f"{NAME}.{package}" for package in packages)],
    package_dir={
        NAME: NAME,
        **{f"{NAME}.{folder}": folder for folder in (*FOLDERS, "examples")},
    },
    # Files that are not Python: the page, and what `baton files` writes.
    package_data={
        f"{NAME}.deploy": ["*", "**/*", ".*", "**/.*"],
        f"{NAME}.examples": ["*"],
        f"{NAME}.proxy.ui": ["assets/*", "assets/vendor/*"],
        f"{NAME}.benchmarks.bench.results": ["assets/*"],
    },
    exclude_package_data={
        "": ["*.pyc", "__pycache__/*", "**/__pycache__/*"],
        f"{NAME}.deploy": [".env", "**/secret.env"],  # secrets of a checkout in use
    },
)
