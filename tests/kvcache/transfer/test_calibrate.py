"""Measuring a link: probes read only the null block, and the fit finds the link's
constants.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.layout import NAMED_ORDERS, KVLayout
from kvcache.transfer.plan.cost import (
    DEFAULT_COSTS,
    CostModel,
    Sample,
    fit_costs,
    measure_link,
    probe,
)
from kvcache.transfer.plan.endpoint import Endpoint


def null_bytes(layout: KVLayout) -> np.ndarray:
    indices = np.arange(np.prod(layout.shape)).reshape(layout.shape)
    is_null = np.zeros(indices.size, bool)
    is_null[np.take(indices, 0, axis=layout.order.index("B"))] = True
    return np.repeat(is_null, layout.itemsize)


@pytest.mark.parametrize("order", NAMED_ORDERS)
@pytest.mark.parametrize("target_bytes", [4096, 1 << 20])
def test_probes_stay_inside_the_null_block_and_the_target_memory(order, target_bytes):
    layout = KVLayout(order, 3, 2, 3, 2, 16, 8, "bfloat16")
    readable = null_bytes(layout)
    end = Endpoint(layout, 0, 1)
    for read in (
        probe(end, target_bytes, 4096, 64),
        probe(end, target_bytes, 4096),
        probe(end, target_bytes, 4 << 20),
    ):
        assert len(read.lengths) >= 1
        assert (read.local_offsets + read.lengths).max() <= target_bytes
        assert read.local_offsets.min() >= 0
        for start, length in zip(read.remote_offsets, read.lengths, strict=True):
            assert length > 0 and readable[start : start + length].all()


@given(st.floats(1e-7, 1e-4), st.floats(1e8, 1e12), st.sampled_from(["cpu", "cuda"]))
def test_fit_recovers_the_constants_that_made_the_samples(
    per_descriptor, bytes_per_s, kind
):
    truth = CostModel(per_descriptor, bytes_per_s, 1e9)
    samples = [
        Sample(n, b, truth.read_s(n, b)) for n, b in ((2, 16 << 20), (512, 512 * 256))
    ]
    costs = fit_costs(*samples, on_gpu=kind == "cuda")
    assert costs.per_descriptor_s == pytest.approx(per_descriptor, rel=0.01)
    assert costs.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert costs.place_bytes_per_s == DEFAULT_COSTS[kind].place_bytes_per_s


def test_noise_never_makes_a_constant_negative():
    costs = fit_costs(Sample(1, 1 << 20, 1.0), Sample(512, 1 << 17, 1e-9))
    assert costs.per_descriptor_s > 0 and costs.bytes_per_s > 0


def test_probes_with_runs_of_one_size_are_refused():
    with pytest.raises(ValueError, match="cost of a descriptor"):
        fit_costs(Sample(1, 10, 1.0), Sample(2, 20, 2.0))


@pytest.mark.parametrize(
    ("bytes_per_s", "max_bytes", "max_s"),
    [(12e6, 16 << 20, 0.05), (1e9, 4 << 20, 0.02)],
)
def test_slow_link_is_measured_quickly_and_fast_link_by_long_reads(
    bytes_per_s, max_bytes, max_s
):
    layout = KVLayout("BHLCND", 3, 8, 32, 2, 64, 128, "bfloat16")
    truth = []

    def read(runs) -> Sample:
        nbytes = int(runs.lengths.sum())
        truth.append(Sample(len(runs.lengths), nbytes, 1e-5 + nbytes / bytes_per_s))
        return truth[-1]

    measured = measure_link(Endpoint(layout, 0, 1), 4 << 20, max_bytes, read)
    costs = fit_costs(*measured)
    assert costs.bytes_per_s == pytest.approx(bytes_per_s, rel=0.05)
    assert sum(sample.seconds for sample in truth) < max_s
    assert measured[1] == truth[0] and (truth[0].num_descriptors, truth[0].nbytes) == (
        512,
        512 * 256,
    )
    assert measured[0].seconds >= 0.002 or measured[0].nbytes == max_bytes
