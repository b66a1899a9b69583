import os
from dataclasses import replace

import pytest

from kvcache import transports as ucx_log
from kvcache.transports import UcxLog, UcxRead, parse_reads, warning_lines
from tests.rigs.process_pair import run_program

# Log lines that UCX 1.23 printed: first tables of all kinds, then only those of the
# requested kind.
PRINTED = """\
[1795251059.655555] [vm:17632:0]   +--------+-------------+------------------------------------+
[1795251059.655555] [vm:17632:0]   | d-df28639e26204d279b937d self cfg#0                       |
[1795251059.655555] [vm:17632:0]   | remote memory write by ucp_put* from host memory to host  |
[1795251059.655555] [vm:17632:0]   | Range  | Description |              Config                |
[1795251059.655555] [vm:17632:0]   | 0..inf | zero-copy   | posix/memory                       |
[1795251059.655555] [vm:17632:0]   +--------+-------------+------------------------------------+
[1795251059.655556] [vm:17632:0] ib_md.c:99  UCX  ERROR  it is | broken
[1795251059.655556] [vm:17632:0] ib_md.c:99  UCX  DIAG  it is | strange
[1795251.724] [vm:786 :0]   | d-31383087b0454f82bf8da8 intra-node cfg#2                 |
[1795251.724] [vm:786 :0] | remote memory read by ucp_get*(multi) into cuda/GPU1 from cuda/dev[2] |
[1795251.724] [vm:786 :0]   | Range      | Description        | Config                  |
[1795251.724] [vm:786 :0]   | 0..1023    | copy-out           | tcp/lo                  |
[1795251.724] [vm:786 :0]   | 1024..inf  | zero-copy          | cuda_ipc/cuda           |
[1795251.724] [vm:786 :0]   | remote memory read by ucp_get* into host memory from host |
[1795251.724] [vm:786 :0]   | 0..inf | software emulation | tcp/lo                      |
[1795251.724] [vm:786 :0]   | active message by ucp_am_send* from host memory           |
[1795251.724] [vm:786 :0]   | 0..inf | short              | sysv/memory                 |
"""  # noqa: E501
OVER_NVLINK, OVER_TCP = parse_reads(PRINTED)


def test_parse_finds_the_tables_about_reads():
    assert OVER_NVLINK == UcxRead(
        "cuda/GPU1", "cuda/dev[2]", "intra-node", "zero-copy", "cuda_ipc/cuda"
    )
    assert (OVER_TCP.local, OVER_TCP.remote) == ("host memory", "host")
    assert str(OVER_TCP) == "tcp/lo (software emulation)"
    assert [line.split("ERROR")[1] for line in warning_lines(PRINTED)] == [
        "  it is | broken"
    ]


@pytest.mark.parametrize(
    "text", ["", "garbage\n||\n| | |\n", "| 0..inf | zero-copy | cma/memory |"]
)
def test_parse_ignores_text_without_a_table(text):
    assert parse_reads(text) == []


@pytest.mark.parametrize(
    ("transport", "changes", "rdma", "fix"),
    [
        (OVER_NVLINK, {}, False, None),
        (
            OVER_NVLINK,
            {"transport": "cuda_copy/cuda tcp/lo"},
            False,
            "leave cuda_ipc in UCX_TLS",
        ),
        (
            OVER_NVLINK,
            {"transport": "rc_mlx5/mlx5_0:1", "where": "inter-node"},
            True,
            None,
        ),
        (
            OVER_NVLINK,
            {"transport": "half on rc_mlx5/mlx5_0:1, half on rc_mlx5/m:1"},
            True,
            None,
        ),
        (
            OVER_NVLINK,
            {"transport": "tcp/eth0", "where": "inter-node"},
            True,
            "nvidia_peermem",
        ),
        (OVER_NVLINK, {"transport": "tcp/eth0", "where": "inter-node"}, False, None),
        (OVER_TCP, {}, False, "CAP_SYS_PTRACE"),
        (OVER_TCP, {"transport": "cma/memory"}, True, None),
        (OVER_TCP, {"where": "inter-node"}, False, None),
        (OVER_TCP, {"where": "inter-node"}, True, "UCX_NET_DEVICES"),
    ],
)
def test_warning_about_a_slow_transport_names_the_fix(
    transport, changes, rdma, fix, monkeypatch
):
    monkeypatch.setattr(ucx_log, "has_rdma", lambda: rdma)
    warning = replace(transport, **changes).warning()
    assert warning is None if fix is None else warning is not None and fix in warning


def test_transport_is_the_one_that_ucx_reports():
    program = (
        "from deploy.doctor import measure; "
        "print(measure('nixl', 'cpu', 'cpu', 1 << 20).ucx_read)"
    )
    # The default transport is tested in test_doctor.py.
    output = run_program(program, UCX_TLS="tcp")
    assert output.strip().startswith("tcp/"), output
    assert "ucp_get" not in output  # UCX's tables must not be printed


def test_parsed_log_is_freed(monkeypatch):
    # The variable may be inherited from a parent process.
    monkeypatch.setenv("UCX_LOG_FILE", "/proc/1/fd/1")
    log = UcxLog()
    log.start()
    file = os.open(os.environ["UCX_LOG_FILE"], os.O_WRONLY)
    for local in ("host memory", "cuda"):
        os.write(
            file, PRINTED.replace("into host memory", f"into {local}").encode() * 1000
        )
        read = log.read_between(gpu_here=local == "cuda", gpu_there=False)
        assert read == replace(OVER_TCP, local=local)
        assert os.fstat(file).st_blocks * 512 <= 4096
    os.close(file)


def test_configured_log_file_is_not_redirected(monkeypatch):
    monkeypatch.setenv("UCX_LOG_FILE", "mine.log")
    log = UcxLog()
    log.start()
    assert os.environ["UCX_LOG_FILE"] == "mine.log"
    assert log.read_between(gpu_here=False, gpu_there=False) is None
