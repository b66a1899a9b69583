"""The frozen configuration of one engine, which each rank process receives."""

from functools import cached_property
from typing import Final, Literal

from pydantic import ConfigDict

from attention.support import resolve_backend_name
from engine.core.budget.step_target import StepTarget
from protocol.settings.node_options import NodeOptions
from protocol.settings.options import Device, DType, KVOptions, ModelOptions
from protocol.settings.speculation import Speculation, parse_speculation
from protocol.version import VERSION

# The itl_target_s that GET /ready reports if the engine has no target. Proxies then
# expect that steps take up to this time.
_UNLIMITED_STEP_S: Final = 1.0


class EngineConfig(NodeOptions, KVOptions, ModelOptions):
    """The server's options, and values that are derived from the options before the
    rank processes start. The field of an option has the option's name.

    Attributes:
        incarnation: an id that is new at every start of the engine.
        scales: scales of FP8 KV, by layer and component.
        threads: CPU threads of each rank; None for torch's default.
        rendezvous_file: path of a file through which the ranks' collectives connect.
        store_port: with several nodes, the port of torch's TCPStore on node 0, through
            which the collectives connect.
        store_fd: the descriptor of the socket that listens on `store_port`; only for
            rank 0.
        side_channel_host: the address that the lease server binds.
        side_channel_advertise: the address at which peers reach the lease server; empty
            if none is known.
        side_channel_port: the port of the lease server; 0 for any free port.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )

    # In the settings, these options may be "auto" or None; in this class they have
    # resolved values. Only `transfer` may still be "auto": each pull then chooses its
    # transport.
    device: Device = "cpu"
    dtype: DType = "float32"
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    transfer: Literal["auto", "nixl", "mapped"] = "auto"

    engine_id: str
    incarnation: str
    model_dir: str
    scales: tuple[float, ...] = ()
    threads: int | None = None
    rendezvous_file: str = ""
    store_port: int = 0
    store_fd: int = -1
    side_channel_host: str = "127.0.0.1"
    side_channel_advertise: str = "127.0.0.1"
    side_channel_port: int = 0
    cluster_secret: bytes = b""

    @property
    def ranks_per_node(self) -> int:
        return self.tp // self.nnodes

    @property
    def node_ranks(self) -> range:
        """The ranks of this node."""
        first = self.node_rank * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    @cached_property
    def speculation(self) -> Speculation:
        return parse_speculation(self.speculate)

    @property
    def max_step_proposals(self) -> int:
        """The largest number of proposed tokens that a step verifies. Without a
        drafter, it is small, because only requests with a prediction have proposals."""
        speculation = self.speculation
        if not speculation.kind:
            return speculation.max_proposals
        return max(self.max_num_seqs, speculation.max_proposals)

    @property
    def max_step_rows(self) -> int:
        """The largest number of rows that a step computes as separate sequences: one
        for each sequence that decodes, and one for each proposal."""
        return self.max_num_seqs + self.max_step_proposals

    def device_of(self, rank: int) -> int:
        """Returns the GPU number of a rank. The rank must be on this node."""
        return self.devices[rank - self.node_ranks.start]

    @property
    def kv_dtype(self) -> str:
        """The dtype in which KV is stored."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def tokens_per_block(self) -> int:
        """Tokens in one block of a block table, summed over the ranks that share the
        tokens of a sequence."""
        return self.block_size * self.dcp

    @property
    def step_target(self) -> StepTarget | None:
        """The target duration of steps that contain decoding sequences. None: only
        --max-num-batched-tokens limits the prompt tokens of these steps."""
        if self.role == "prefill":
            return None
        if self.itl_target_s is not None:
            return StepTarget(self.itl_target_s, is_explicit=True)
        seconds = self.usual_itl_target_for(self.device)
        if seconds is None:
            return None
        # On a CPU the target always applies, because a step with
        # --max-num-batched-tokens tokens may take seconds.
        return StepTarget(seconds, only_in_pair=self.device != "cpu")

    @property
    def _published_itl_target_s(self) -> float:
        """The ITL target that GET /ready reports; _UNLIMITED_STEP_S if steps have no
        target."""
        target = self.step_target
        return _UNLIMITED_STEP_S if target is None else target.seconds

    @property
    def geometry(self) -> dict[str, str | int | float]:
        """The description of the engine in the response of GET /ready."""
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
            "itl_target_s": self._published_itl_target_s,
            "engine_id": self.engine_id,
            "incarnation": self.incarnation,
            "side_channel_host": self.side_channel_advertise,
            # This engine makes offers, and subscribes to offers of other engines
            # (protocol.kv_offers.Offer).
            "subscribes": 1,
        }
