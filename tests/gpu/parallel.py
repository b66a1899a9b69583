"""Runs tests/gpu in processes side by side: python tests/gpu/parallel.py [options for pytest].

Most of these tests wait for processes to start, so a machine of many cores runs them all at once:
each file by itself, long ones in shards, those of one GPU spread over the GPUs. Tests marked
`alone`, which look at what a whole GPU does, come last. Prints what failed; the logs, with
what took longest, are left in build/gpu-tests.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOGS = ROOT / "build" / "gpu-tests"
TIMEOUT_S = float(os.environ.get("BATON_TEST_GPU_TIMEOUT_S", "300"))
SHARDS = {
    "test_pulls": 7,
    "test_runner": 4,
    "test_flashinfer": 6,
    "test_nothing_late": 9,
}
_FAILURES = re.compile(r"^(FAILED|ERROR|E   ).*", re.MULTILINE)


@dataclass(frozen=True)
class Group:
    """Tests of one file that run in one process."""

    file: Path
    marks: str
    devices: str
    shard: str = "0/1"

    @property
    def name(self) -> str:
        kind = "multi" if self.marks.startswith("multi_gpu") else "one"
        alone = "" if "not alone" in self.marks else "-alone"
        return f"{self.file.stem}-{kind}{alone}-{self.shard.replace('/', 'of')}"


def groups(devices: list[str], *, alone: bool) -> list[Group]:
    which = "alone" if alone else "not alone"
    made: list[Group] = []
    for file in sorted(HERE.glob("test_*.py")):
        text = file.read_text()
        if alone and "mark.alone" not in text:
            continue
        num_shards = 1 if alone else SHARDS.get(file.stem, 1)
        for index in range(num_shards):
            shard = f"{index}/{num_shards}"
            if "mark.gpu" in text:
                device = devices[len(made) % len(devices)]
                made.append(
                    Group(file, f"gpu and not multi_gpu and {which}", device, shard)
                )
            if "mark.multi_gpu" in text and len(devices) > 1:
                marks = f"multi_gpu and {which}"
                made.append(Group(file, marks, ",".join(devices), shard))
    return made


def run(group: Group, options: list[str]) -> tuple[Group, int, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--durations=8",
        "--durations-min=1",
    ]
    command += [
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-m",
        group.marks,
        str(group.file),
    ]
    env = {"CUDA_VISIBLE_DEVICES": group.devices, "BATON_TEST_SHARD": group.shard}
    env["OMP_NUM_THREADS"] = "2"  # what runs on the CPU is small, and they are many
    started_s = time.monotonic()
    log = LOGS / f"{group.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            env={**os.environ, **env},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = 124
    took_s = time.monotonic() - started_s
    text = log.read_text(errors="replace")
    lines = [
        line
        for line in text.splitlines()
        if re.search(r"\d+ (passed|failed|error)", line)
    ]
    result = (
        lines[-1].strip("= ") if lines else (text.splitlines() or ["no output"])[-1]
    )
    print(f"{took_s:6.1f} s  {code:3d}  {group.name}: {result[:120]}", flush=True)
    return group, code, text


def visible_devices() -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [device for device in listed.split(",") if device]
    if shutil.which("nvidia-smi") is None:
        return []
    found = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
    )
    return [
        str(index)
        for index in range(len(re.findall("^GPU ", found.stdout, re.MULTILINE)))
    ]


def main(options: list[str]) -> int:
    devices = visible_devices()
    if not devices:
        print("no GPU found: nothing was run")
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    done = []
    for alone in (False, True):
        chosen = groups(devices, alone=alone)
        with ThreadPoolExecutor(1 if alone else len(chosen) or 1) as pool:
            done += list(pool.map(lambda group: run(group, options), chosen))
    bad = [
        (group, text) for group, code, text in done if code not in (0, 5)
    ]  # 5: no tests
    for group, text in bad:
        print(f"---- {group.name}")
        found = [match.group(0)[:180] for match in _FAILURES.finditer(text)]
        print("\n".join(found[-14:] or text.splitlines()[-6:]))
    print(
        f"{len(done)} processes, {len(bad)} failed, {time.monotonic() - started_s:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
