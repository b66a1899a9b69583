"""What is said of a link to a peer once it has been used: the transport, its speed, and the fix for
one that is slower than it should be."""

from kvcache.transfer.link.ucx_log import GPU_FIX, UcxRead, has_rdma
from kvcache.transfer.plan.cost import CostModel
from protocol.process.logging import get_logger

logger = get_logger(__name__)

# Over NVLink or between GPUs of one PCIe switch it is more, by way of host memory less.
SLOW_GPU_BYTES_PER_S = 15e9
SLOW_GPU_FIX = GPU_FIX


def log_measured(
    engine_id: str, costs: CostModel, way: UcxRead | None, *, between_gpus: bool
) -> None:
    """After NIXL's link to a peer was measured at first contact.

    Args:
        way: by which UCX says that it reads; None: it does not say, and the rate must do.
    """
    logger.info("prefill server %s: NIXL by %s, %s", engine_id, way or "an untold way", costs)
    if way is not None:
        warning = way.warning(has_rdma=has_rdma())
        if warning is not None:
            logger.warning("prefill server %s: %s", engine_id, warning)
    elif between_gpus and costs.bytes_per_s < SLOW_GPU_BYTES_PER_S:
        logger.warning(
            "prefill server %s: %.2f GB/s is what copies through host memory reach. %s",
            engine_id,
            costs.bytes_per_s / 1e9,
            SLOW_GPU_FIX,
        )


def log_first_pull(engine_id: str, path: str, way: UcxRead | None, bytes_per_s: float) -> None:
    """After the first pull from a peer that was long enough to tell its speed."""
    transport = (
        "mapped memory" if path == "mapped" else f"NIXL, {path}, by {way or 'an untold way'}"
    )
    logger.info("prefill server %s: %s, %.2f GB/s", engine_id, transport, bytes_per_s / 1e9)
