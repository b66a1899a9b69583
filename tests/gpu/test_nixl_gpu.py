"""NIXL on GPU memory: pulls between processes, direct and staged, on one GPU and between two."""

from typing import Any

import numpy as np
import pytest

from kvcache.transfer.pulls.messages import PullDone, PullDrained, PullFailed
from tests.gpu.test_mapped import DEVICES, NUM_GPUS
from tests.rigs.memory_pair import Decode, expected
from tests.rigs.process_pair import Child, on_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 1, reason="needs a CUDA GPU"),
]
ENDINGS = (PullDone, PullFailed, PullDrained)


def nixl(device: str) -> Any:
    from kvcache.transfer.link.nixl_agent import NixlAgent

    return on_device(NixlAgent, "D", device)


@pytest.mark.parametrize(("source", "target"), [*DEVICES, ("cpu", "cuda:0"), ("cuda:0", "cpu")])
@pytest.mark.parametrize(
    ("p", "d", "paths"),
    [
        ({}, {}, ("direct", "staged")),
        ({"tp": 2}, {}, ("direct", "staged")),
        ({"order": "LBCNHD", "block_size": 16}, {}, ("staged",)),
    ],
)
def test_a_pull_over_nixl(
    made: list[Any],
    source: str,
    target: str,
    p: dict[str, Any],
    d: dict[str, Any],
    paths: tuple[str, ...],
) -> None:
    prefill = Child("prefill", device=source, **p)
    made.append(prefill)
    decode = Decode(lambda: nixl(target), device=target, staging_bytes=1 << 20, **d)
    made.append(decode)
    for number in range(3):
        remote = prefill.lease([5, 2, 9], 23)
        decode.coordinator.pull(f"pull-{number}", remote, 1, 23, [3, 1, 7])
        done = decode.wait(*ENDINGS)
        assert isinstance(done, PullDone), done
        assert done.path in paths
        found = decode.tokens([3, 1, 7], 1, 23)
        assert np.array_equal(found, expected(remote, 1, 23))
