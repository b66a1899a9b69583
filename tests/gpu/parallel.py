"""Runs tests/gpu in parallel processes: python tests/gpu/parallel.py [pytest options].

Most of these tests wait for processes to start, so a machine with many cores can run
all of them concurrently. Each file runs in a separate process, or in several shards if
it takes long. Tests that need one GPU are distributed over all GPUs. Tests marked
`alone` need a GPU without other load and run last. The script prints failures. It
writes logs, with the durations of the slowest tests, to build/gpu-tests.
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
_NO_TESTS = 5  # pytest's exit code if it selected no tests
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
        suffix = "" if "not alone" in self.marks else "-alone"
        return f"{self.file.stem}-{kind}{suffix}-{self.shard.replace('/', 'of')}"


def groups(devices: list[str], *, exclusive: bool) -> list[Group]:
    exclusive_marks = "alone" if exclusive else "not alone"
    result: list[Group] = []
    for file in sorted(HERE.glob("test_*.py")):
        text = file.read_text()
        if exclusive and "mark.alone" not in text:
            continue
        num_shards = 1 if exclusive else SHARDS.get(file.stem, 1)
        for index in range(num_shards):
            shard = f"{index}/{num_shards}"
            if "mark.gpu" in text:
                marks = f"gpu and not multi_gpu and {exclusive_marks}"
                device = devices[len(result) % len(devices)]
                result.append(Group(file, marks, device, shard))
            if "mark.multi_gpu" in text and len(devices) > 1:
                marks = f"multi_gpu and {exclusive_marks}"
                result.append(Group(file, marks, ",".join(devices), shard))
    return result


def run(group: Group, options: list[str]) -> tuple[Group, int, str]:
    """Runs the tests of a group. Returns the group, pytest's exit code and the
    output.
    """
    command = [sys.executable, "-m", "pytest", "-q"]
    command += ["--durations=8", "--durations-min=1"]
    command += ["-p", "no:cacheprovider", "--tb=short"]
    command += ["-m", group.marks, str(group.file)]
    env = {
        "CUDA_VISIBLE_DEVICES": group.devices,
        "BATON_TEST_SHARD": group.shard,
        # Two threads are enough, because many processes run concurrently and need
        # little CPU time.
        "OMP_NUM_THREADS": "2",
    }
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
    duration_s = time.monotonic() - started_s
    text = log.read_text(errors="replace")
    lines = text.splitlines() or ["no output"]
    summaries = [
        line for line in lines if re.search(r"\d+ (passed|failed|error)", line)
    ]
    result = summaries[-1].strip("= ") if summaries else lines[-1]
    print(f"{duration_s:6.1f} s  {code:3d}  {group.name}: {result[:120]}", flush=True)
    return group, code, text


def visible_devices() -> list[str]:
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        return [device for device in variable.split(",") if device]
    if shutil.which("nvidia-smi") is None:
        return []
    process = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
    )
    num_gpus = len(re.findall("^GPU ", process.stdout, re.MULTILINE))
    return [str(index) for index in range(num_gpus)]


def main(options: list[str]) -> int:
    devices = visible_devices()
    if not devices:
        print("no GPU found: nothing was run")
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    results = []
    for exclusive in (False, True):
        selected = groups(devices, exclusive=exclusive)
        num_threads = 1 if exclusive else max(1, len(selected))
        with ThreadPoolExecutor(num_threads) as pool:
            results += list(pool.map(lambda group: run(group, options), selected))
    failed = [
        (group, text) for group, code, text in results if code not in (0, _NO_TESTS)
    ]
    for group, text in failed:
        print(f"---- {group.name}")
        failures = [match.group(0)[:180] for match in _FAILURES.finditer(text)]
        print("\n".join(failures[-14:] or text.splitlines()[-6:]))
    duration_s = time.monotonic() - started_s
    print(f"{len(results)} processes, {len(failed)} failed, {duration_s:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
