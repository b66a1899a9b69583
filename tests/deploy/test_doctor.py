import json
from dataclasses import replace

import pytest
import torch

from deploy.doctor import Link, advice, main, measure, text, used_path
from kvcache.transports import Host

GPU_HOST = Host(
    cores=16, gpus=("H200", "H200"), peer_access=((0, 1), (1, 0)),
    packages={"nixl": "1", "triton": "3", "flashinfer-python": "1", "torch": "2"},
    ucx_modules=("cuda",), ucx_environment={}, shm_bytes=1 << 30, memlock_bytes=-1,
    can_read_peers=True,
)  # fmt: skip
FAST = Link("mapped", "cuda:0", "cuda:1", 360e9)
SLOW = Link("nixl", "cuda:0", "cuda:1", 6e9)


def test_complete_machine_gets_no_advice():
    assert advice(GPU_HOST, [FAST]) == []
    with_rdma = replace(GPU_HOST, rdma_devices=("mlx5_0",), rdma_usable=True)
    assert advice(with_rdma, [FAST]) == []
    assert "RDMA devices: mlx5_0" in text(with_rdma, [FAST], [])
    assert "nothing needs fixing" in text(GPU_HOST, [FAST], [])


@pytest.mark.parametrize(
    ("host", "word"),
    [
        (replace(GPU_HOST, peer_access=()), "CUDA_VISIBLE_DEVICES"),
        (
            replace(GPU_HOST, packages={**GPU_HOST.packages, "nixl": None}),
            "pip install nixl",
        ),
        (
            replace(GPU_HOST, packages={**GPU_HOST.packages, "triton": None}),
            "pip install triton",
        ),
        (replace(GPU_HOST, ucx_environment={"UCX_TLS": "tcp"}), "unset UCX_TLS"),
        (replace(GPU_HOST, shm_bytes=1 << 20), "shm_size"),
        (replace(GPU_HOST, gpus=(), can_read_peers=False), "ptrace_scope"),
        (replace(GPU_HOST, rdma_devices=("mlx5_0",)), "devices: /dev/infiniband"),
        (
            replace(
                GPU_HOST,
                rdma_devices=("mlx5_0",),
                rdma_usable=True,
                memlock_bytes=8 << 20,
            ),
            "8 MiB may be locked. Fix: ulimit -l unlimited",
        ),
    ],
)
def test_missing_package_or_device_is_named_with_the_fix(host, word):
    (note,) = advice(host, [FAST])
    assert word in note


def test_slow_link_between_gpus_is_a_warning_with_the_fix():
    (note,) = advice(GPU_HOST, [FAST, SLOW])
    assert "6.00 GB/s" in note and "ipc: host" in note
    assert used_path("auto", [FAST, SLOW]) == "mapped"
    assert (
        used_path(
            "auto", [replace(FAST, bytes_per_s=None, reason="no peer access"), SLOW]
        )
        == "nixl"
    )


def test_reported_path_is_the_default_of_servers():
    assert "--transfer auto (the default here) uses: mapped" in text(
        GPU_HOST, [FAST, SLOW], []
    )
    cpu_host = replace(GPU_HOST, gpus=(), peer_access=())
    assert "--transfer nixl (the default here) uses: nixl" in text(
        cpu_host, [FAST, SLOW], []
    )
    assert used_path("nixl", [FAST]).startswith("no path")


def test_failed_link_has_a_reason():
    # Either this machine has no GPU, or a CPU process cannot map the GPU's memory.
    link = measure("mapped", "cpu", "cuda:0", 1 << 20)
    assert link.bytes_per_s is None and link.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU")
def test_both_paths_between_processes_of_this_machine_are_measured(capsys):
    assert main(["--nbytes", str(4 << 20), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [link["path"] for link in report["links"]] == ["mapped", "nixl"]
    assert all(link["bytes_per_s"] > 0 for link in report["links"]), report["links"]
    transport = report["links"][1]["ucx_read"]["transport"]
    assert transport.startswith(("cma/", "sysv/", "posix/")), transport


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-pairs", "3"], "--max-pairs: has no effect without URLS"),
        (["http://h:1", "--no-measure"], "--measure: has no effect with URLS"),
    ],
)
def test_options_without_effect_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert message in capsys.readouterr().err
