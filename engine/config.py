"""The frozen configuration of one engine, as it travels to each of its rank processes."""

from typing import Literal

from pydantic import ConfigDict

from attention.support import resolve_backend_name
from protocol.settings.options import Device, DType, KVOptions, ModelOptions
from protocol.version import VERSION


class EngineConfig(KVOptions, ModelOptions):
    """The server's options, by their names, and what was made of them when it started. Facts
    learned later live elsewhere."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )

    # Options that are not "auto" any more.
    device: Device = "cpu"
    dtype: DType = "float32"
    max_num_batched_tokens: int = 2048
    itl_target_s: float = 0.025
    transfer: Literal["auto", "nixl", "mapped"] = "auto"

    engine_id: str
    incarnation: str  # new at every start
    model_dir: str
    scales: tuple[float, ...] = ()  # of FP8 KV, by layer and component
    threads: int | None = None
    meeting: str = (
        ""  # the path of a file by which the ranks' collectives find each other
    )
    side_channel_host: str = "127.0.0.1"  # bound here
    side_channel_advertise: str = "127.0.0.1"  # told to peers; empty: none is known
    side_channel_port: int = 0
    cluster_secret: bytes = b""

    @property
    def kv_dtype(self) -> str:
        """What KV is stored in."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def tokens_per_block(self) -> int:
        """Tokens in one block of a block table, on all ranks that share it."""
        return self.block_size * self.dcp

    @property
    def geometry(self) -> dict[str, str | int | float]:
        """What a server tells of its engine at GET /ready."""
        return {
            "version": VERSION,
            "device": self.device,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "kv_layout": self.kv_layout,
            "tp": self.tp,
            "dcp": self.dcp,
            "attention_backend": resolve_backend_name(
                self.attention_backend, self.device
            ),
            "itl_target_s": self.itl_target_s,
            "engine_id": self.engine_id,
            "incarnation": self.incarnation,
            "side_channel_host": self.side_channel_advertise,
            "subscribes": 1,  # and is subscribed to: see protocol.kv_offers.Offer
        }
