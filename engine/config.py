"""The frozen configuration of one engine, as it travels to each of its rank processes."""

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rank process needs to know at start; facts learned later live elsewhere.

    A field that is named as an option of the server has its value: `serve` copies it.

    Addresses are `ipc://PATH`. `http_address` connects rank 0 to the HTTP process,
    `control_address` connects rank 0 to the other ranks, `transfer_address` connects the pull
    coordinator to every rank's pull worker.
    """

    role: str  # "prefill" | "decode"
    engine_id: str
    incarnation: str  # new at every start
    model_dir: str
    load_format: str = "auto"  # "auto" | "dummy"
    seed: int = 0
    device: str = "cpu"  # "cpu" | "cuda"
    devices: list[int] = []  # CUDA indices, one per rank
    dtype: str = "float32"
    tp: int = 1
    dcp: int = 1  # ranks that share the tokens of every sequence; divides tp
    block_size: int = 64  # tokens of a block on one rank
    kv_layout: str = "BHLCND"
    kv_cache_dtype: str = "auto"  # "auto": dtype
    kv_scales: list[float] = []  # of FP8 KV, by layer and component; resolved once for all ranks
    attention_backend: str = "auto"
    pack_weights: bool = True
    kv_cache_tokens: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9  # part of the GPU that weights, steps and KV may take
    enforce_eager: bool = False  # no CUDA graphs
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_model_len: int | None = None
    grammar_timeout_s: float = 2.0
    enable_prefix_caching: bool = True
    threads: int | None = None
    http_address: str
    control_address: str
    transfer_address: str
    store_host: str = "127.0.0.1"  # torch.distributed rendezvous, used when tp > 1
    side_channel_host: str = "127.0.0.1"  # bound here
    side_channel_advertise: str = "127.0.0.1"  # told to peers
    side_channel_port: int = 0
    cluster_secret: bytes = b""
    lease_s: float = 30.0
    kv_load_failure_policy: str = "recompute"  # "recompute" | "fail"
    transfer: str = "auto"
    kv_convert: bool = False
    handshake_timeout_s: float = 5.0
    connect_timeout_s: float = 5.0
    pull_timeout_s: float = 30.0
    fence_timeout_s: float = 5.0
    quarantine_timeout_s: float = 30.0
    staging_bytes: int = 512 * 2**20
    transfer_costs: tuple[float, ...] = ()  # as in the settings; empty: measured
    log_level: str = "info"

    @property
    def kv_dtype(self) -> str:
        """What KV is stored in."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def tokens_per_block(self) -> int:
        """Tokens in one block of a block table, on all ranks that share it."""
        return self.block_size * self.dcp
