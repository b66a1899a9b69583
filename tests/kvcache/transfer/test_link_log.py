import logging
from dataclasses import replace

import pytest

from kvcache.transfer.link.ucx_log import UcxRead, log_measured
from kvcache.transfer.plan.cost import CostModel

IPC = UcxRead("cuda/GPU1", "cuda/dev[2]", "intra-node", "zero-copy", "cuda_ipc/cuda")


def costs(bytes_per_s: float) -> CostModel:
    return CostModel(per_descriptor_s=6e-6, bytes_per_s=bytes_per_s, reformat_bytes_per_s=7e11)


def test_a_slow_link_between_gpus_is_a_warning_with_the_fix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log_measured("P", costs(300e9), None, between_gpus=True)
    log_measured("P", costs(3e9), None, between_gpus=False)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    log_measured("P", costs(3e9), None, between_gpus=True)
    warning = caplog.records[-1]
    assert warning.levelname == "WARNING" and "ipc: host" in warning.message


def test_what_ucx_says_counts_more_than_the_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_measured("P", costs(3e9), IPC, between_gpus=True)
    (record,) = caplog.records
    assert record.levelname == "INFO" and "NIXL by cuda_ipc/cuda (zero-copy)" in record.message
    staged = replace(IPC, how="software emulation", transport="cuda_copy/cuda tcp/lo")
    log_measured("P", costs(300e9), staged, between_gpus=True)
    assert caplog.records[-1].levelname == "WARNING"
    assert "through host memory" in caplog.records[-1].message
