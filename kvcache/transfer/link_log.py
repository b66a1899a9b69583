"""What is said of a link to a peer once it has been used: the transport, its speed, and the fix for
one that is slower than it should be."""

import logging

from kvcache.transfer.cost import CostModel

logger = logging.getLogger(__name__)

# Over NVLink or between GPUs of one PCIe switch it is more, by way of host memory less.
SLOW_GPU_BYTES_PER_S = 15e9
SLOW_GPU_FIX = (
    "Let both servers see both GPUs (no CUDA_VISIBLE_DEVICES that hides one; containers of one "
    "IPC namespace, ipc: host), leave cuda_ipc in UCX_TLS, keep PYTORCH_CUDA_ALLOC_CONF free of "
    "expandable_segments, and see whether `nvidia-smi topo -p2p r` says OK; on one host "
    "--transfer auto needs no UCX."
)


def log_measured(engine_id: str, costs: CostModel, *, between_gpus: bool) -> None:
    """After NIXL's link to a peer was measured at first contact."""
    logger.info("prefill server %s: NIXL, %s", engine_id, costs)
    if between_gpus and costs.bytes_per_s < SLOW_GPU_BYTES_PER_S:
        logger.warning(
            "prefill server %s: %.2f GB/s is what copies through host memory reach. %s",
            engine_id,
            costs.bytes_per_s / 1e9,
            SLOW_GPU_FIX,
        )


def log_first_pull(engine_id: str, path: str, bytes_per_s: float) -> None:
    """After the first pull from a peer that was long enough to tell its speed."""
    transport = "mapped memory" if path == "mapped" else f"NIXL, {path}"
    logger.info("prefill server %s: %s, %.2f GB/s", engine_id, transport, bytes_per_s / 1e9)
