"""The real image of deploy/Dockerfile, built without a daemon and without a registry.

buildah builds the image in chroots, and caches its layers. So only the first build
takes minutes, and a build after a change of Baton's code takes seconds. The base image
in the FROM line of the Dockerfile needs a registry. It is replaced by a base image that
debootstrap makes from Debian packages. Apart from that and the build argument
TORCH_INDEX, the Dockerfile is used unchanged.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
BUILD_TIMEOUT_S = 1800.0
# Debian 12 has Python 3.11, like the base image that the Dockerfile names.
_SUITE = "bookworm"
_TAG = "localhost/baton:cpu"
_BASE = f"localhost/python-{_SUITE}"
_BASE_PACKAGES = "python3,python3-pip,python-is-python3,ca-certificates,libgomp1"
_BASE_CONTAINERFILE = "FROM scratch\nADD root.tar /\nENV LANG=C.UTF-8\n"
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
_PROGRAMS = ("buildah", "debootstrap", "unshare", "nsenter", "chroot")


@dataclass(frozen=True)
class Image:
    """An image whose files are mounted on this machine.

    Attributes:
        root: folder with the files of the image. It must not be changed.
        env: environment variables that the image sets.
        uid: user that runs the image's programs.
        health_command: command of the image's health check.
    """

    root: Path
    env: dict[str, str]
    uid: int
    working_directory: str
    command: tuple[str, ...]
    health_command: tuple[str, ...]


def missing_requirement() -> str | None:
    """Return what this system lacks to build and run images, or None if nothing."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in _PROGRAMS if not shutil.which(name)]
    return f"needs {', '.join(missing)}" if missing else None


@contextlib.contextmanager
def mounted_image() -> Iterator[Image]:
    """Build the image of deploy/Dockerfile, and mount its files until the block ends.

    Processes that build at the same time wait for one another, and the later ones find
    all layers in the cache.
    """
    container = f"baton-test-{os.getpid()}-{secrets.token_hex(4)}"
    folder = _store()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_stale_containers()
        image_id = _build()
        _buildah("from", "--pull-never", "--name", container, image_id)
    try:
        yield _image(image_id, Path(_buildah("mount", container)))
    finally:
        _buildah("rm", container)


def _store() -> Path:
    """Return the folder of the images, which is a part of the cache of test models."""
    cache = os.environ.get("BATON_TEST_CACHE")
    default_folder = Path.home() / ".cache" / "baton" / "test-models"
    return Path(cache or default_folder) / "images"


def _buildah(*argv: str, check: bool = True) -> str:
    """Run buildah on the store of test images and return what it prints."""
    folders = ["--root", str(_store() / "store"), "--runroot", str(_store() / "run")]
    return _run("buildah", *folders, *argv, check=check).strip()


def _run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    assert done.returncode == 0 or not check, (
        f"{' '.join(argv)}:\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def _build() -> str:
    """Build the image and return its id. Remove the previous image if it differs."""
    if not _buildah("images", "--quiet", "--filter", f"reference={_BASE}"):
        _build_base()
    replaced = _buildah("images", "--quiet", "--no-trunc", _TAG, check=False)
    pip = _pip_settings()
    argv = ["bud", "--isolation", "chroot", "--format", "docker", "--layers"]
    argv += ["--from", _BASE, "--tag", _TAG]
    # TORCH_INDEX is also a variable of the Makefile. If pip on this machine looks for
    # packages in local folders, the build gets torch from these folders.
    index = os.environ.get("TORCH_INDEX")
    if links := pip.get("find-links"):
        index = index or pip.get("index-url", "https://pypi.org/simple")
        for link in links.split():
            if os.path.isdir(link):
                argv += ["--volume", f"{link}:{link}:ro"]
    if index:
        argv += ["--build-arg", f"TORCH_INDEX={index}"]
    with tempfile.NamedTemporaryFile("r") as image_id:
        argv += ["--iidfile", image_id.name, "--file", str(DOCKERFILE), str(ROOT)]
        _buildah(*argv)
        new_id = image_id.read().strip()
    if replaced and replaced != new_id:
        # This also removes the layers of the replaced image, except those that the new
        # image or a container needs.
        _buildah("rmi", replaced, check=False)
    return new_id


def _build_base() -> None:
    """Build the image that replaces the FROM of the Dockerfile."""
    with tempfile.TemporaryDirectory(dir=_store()) as folder:
        root = Path(folder) / "root"
        _run(
            "debootstrap",
            "--variant=minbase",
            f"--include={_BASE_PACKAGES}",
            _SUITE,
            str(root),
        )
        # Let pip install packages into the system's Python, as in the base image that
        # the Dockerfile names.
        for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()
        for archive in root.glob("var/cache/apt/archives/*.deb"):
            archive.unlink()
        # The base image uses the package index and the CA certificates of this machine.
        if (certificates := Path("/") / _CERTIFICATES).exists():
            shutil.copy(certificates, root / _CERTIFICATES)
        settings = _pip_settings() | {"cert": f"/{_CERTIFICATES}"}
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        (root / "etc/pip.conf").write_text("[global]\n" + "".join(lines))
        _run("tar", "-C", str(root), "-cf", f"{folder}/root.tar", ".")
        shutil.rmtree(root)
        file = Path(folder) / "Containerfile"
        file.write_text(_BASE_CONTAINERFILE)
        argv = ["bud", "--isolation", "chroot", "--format", "docker"]
        _buildah(*argv, "--tag", _BASE, "--file", str(file), folder)


def _pip_settings() -> dict[str, str]:
    """Return the settings of pip on this machine that determine where it finds
    packages.
    """
    names = ("index-url", "find-links", "trusted-host")
    settings = {}
    for line in _run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        name = name.rpartition(".")[2]
        if name in names:
            settings[name] = value.strip("'\"")
    return settings


def _remove_stale_containers() -> None:
    """Remove containers of processes that were killed."""
    for name in _buildah("containers", "--format", "{{.ContainerName}}").split():
        prefix, _, suffix = name.partition("baton-test-")
        pid = suffix.partition("-")[0]
        if suffix and not prefix and not Path("/proc", pid).exists():
            _buildah("rm", name)


def _image(image_id: str, root: Path) -> Image:
    config = json.loads(_buildah("inspect", "--type", "image", image_id))
    config = config["Docker"]["config"]
    kind, *health_command = config["Healthcheck"]["Test"]
    assert kind == "CMD", kind
    return Image(
        root=root,
        env=dict(variable.split("=", 1) for variable in config["Env"]),
        uid=int(config["User"]),
        working_directory=config["WorkingDir"],
        command=tuple(config["Cmd"]),
        health_command=tuple(health_command),
    )
