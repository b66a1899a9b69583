"""The constants of a host, which `baton bench advise` measures, saves and reads."""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from benchmarks.advice.deployments import Deployment, arrangements
from benchmarks.bench.errors import BenchError
from benchmarks.simulation.contention import slowdown
from benchmarks.simulation.times import EngineTimes

_POSITIVE_TIMES = ("step_s", "token_s")
_OPTIONAL = ("mixed_decode_slowdown", "mixed_prompt_slowdown")
_COUNTS = ("capacity", "max_streams", "step_tokens", "block_tokens")


@dataclass(frozen=True)
class Correction:
    """Ratios of the time that work takes on saturated servers to the time that single
    measurements predict.

    Attributes:
        request: factor for the computing time of prompts and the processor time of
            requests and hand-overs. Delays such as `request_s` are not corrected.
        step: factor for the decode time of a step and the delivery of its tokens.
    """

    request: float = 1.0
    step: float = 1.0

    def apply(self, times: EngineTimes) -> EngineTimes:
        """Return `times` with both factors applied."""
        return replace(
            times,
            token_s=times.token_s * self.request,
            pair_s=times.pair_s * self.request,
            request_work_s=times.request_work_s * self.request,
            handoff_work_s=times.handoff_work_s * self.request,
            handoff_step_s=times.handoff_step_s * self.request,
            step_s=times.step_s * self.step,
            sequence_s=times.sequence_s * self.step,
            held_token_s=times.held_token_s * self.step,
            delivery_s=times.delivery_s * self.step,
            delivery_token_s=times.delivery_token_s * self.step,
        )


@dataclass(frozen=True)
class HostConstants:
    """Times and limits of one server with one model, measured on one host.

    Attributes:
        num_servers: number of servers with which the slowdowns were measured.
        options: options of the servers, such as --threads=1.
        max_model_len: maximum length of a prompt together with its answer (tokens).
        split_target_s: target time between tokens of the decode servers of a split;
            None: no target limits the prompt tokens of a step.
        replica_target_s: target time between tokens of complete servers; None: there is
            no such target.
        probe_s: seconds of a fixed small load. If this load takes longer in a later
            measurement, the host has become slower.
        corrections: the Correction of each deployment that `arrangements` returns, by
            `Deployment.arrangement`.
    """

    model: str
    device: str
    num_servers: int
    options: tuple[str, ...]
    date: str
    max_model_len: int
    split_target_s: float | None
    replica_target_s: float | None
    probe_s: float
    times: EngineTimes
    corrections: dict[str, Correction] = field(default_factory=dict)

    def times_of(self, deployment: Deployment) -> EngineTimes:
        """Return the times of a server of this deployment.

        A split that was not measured gets the correction of the measured split with the
        closest number of prefill servers. No correction applies if the constants were
        measured with a different number of servers.
        """
        correction = self.corrections.get(deployment.arrangement)
        if correction is not None:
            return correction.apply(self.times)
        num_servers = deployment.prefills + deployment.decodes
        measured = [
            each
            for each in arrangements(num_servers)
            if each.is_split == deployment.is_split
            and each.arrangement in self.corrections
        ]
        if not measured:
            return self.times
        nearest = min(
            measured, key=lambda each: abs(each.prefills - deployment.prefills)
        )
        return self.corrections[nearest.arrangement].apply(self.times)

    def describe(self) -> str:
        """Return the constants in one line."""
        times = self.times
        return (
            f"step {times.step_s * 1e3:.2f} ms + {times.sequence_s * 1e3:.3f} ms a "
            f"stream + {times.held_token_s * 1e9:.0f} ns a token of KV; prompt "
            f"{times.token_s * 1e6:.0f} us a token + {times.pair_s * 1e9:.1f} ns a "
            f"pair; request {times.request_s * 1e3:.1f} ms; hand-over "
            f"{times.handoff_s * 1e3:.1f} ms, then {times.sent_s * 1e3:.1f} ms + "
            f"{times.sent_token_s * 1e6:.1f} us a token, and "
            f"{times.handoff_step_s * 1e3:.1f} ms of a step; outside of engines "
            f"{times.request_work_s * 1e3:.1f} ms a request + "
            f"{times.delivery_s * 1e3:.2f} ms a step + "
            f"{times.delivery_token_s * 1e3:.3f} ms a token + "
            f"{times.handoff_work_s * 1e3:.1f} ms a hand-over; slowdown of "
            f"{self.num_servers} busy servers: decode "
            f"{slowdown(times.decode_slowdown, self.num_servers):.2f}, prompts "
            f"{slowdown(times.prompt_slowdown, self.num_servers):.2f}"
            f"{self._describe_mixed_slowdowns()}"
            f"{self._describe_corrections()}"
        )

    def _describe_mixed_slowdowns(self) -> str:
        times = self.times
        if not (times.mixed_decode_slowdown and times.mixed_prompt_slowdown):
            return ""
        return (
            "; decode while the other servers compute prompts "
            f"{slowdown(times.mixed_decode_slowdown, self.num_servers):.2f}, prompts "
            "while they decode "
            f"{slowdown(times.mixed_prompt_slowdown, self.num_servers):.2f}"
        )

    def _describe_corrections(self) -> str:
        return "".join(
            f"; saturated {name}: requests x {correction.request:.2f}, steps x "
            f"{correction.step:.2f}"
            for name, correction in self.corrections.items()
        )


def save_constants(path: Path, constants: HostConstants) -> None:
    """Write the constants as JSON.

    Raises:
        BenchError: the file cannot be written.
    """
    data = msgspec.json.format(msgspec.json.encode(asdict(constants)), indent=2)
    try:
        path.write_bytes(data + b"\n")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from None


def read_constants(path: Path) -> HostConstants:
    """Read constants that `save_constants` wrote.

    Raises:
        BenchError: the file cannot be read, or a field is missing or invalid.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from None
    try:
        constants = msgspec.json.decode(data, type=HostConstants)
    except msgspec.DecodeError as error:
        raise BenchError(f"{path}: {error}") from None
    _check(path, constants)
    return constants


def _check(path: Path, constants: HostConstants) -> None:
    times = constants.times
    for name, value in asdict(times).items():
        values = value if isinstance(value, tuple | list) else [value]
        if not values and name in _OPTIONAL:
            continue
        if not values or not all(0 <= number < math.inf for number in values):
            raise BenchError(f"{path}: times.{name} {value} must be from 0")
    for name in (*_POSITIVE_TIMES, *_COUNTS):
        if not getattr(times, name):
            raise BenchError(f"{path}: times.{name} must be above 0")
    for name, correction in constants.corrections.items():
        if not all(0 < factor < math.inf for factor in asdict(correction).values()):
            raise BenchError(f"{path}: corrections.{name} must be above 0")
    for name in ("decode_slowdown", "prompt_slowdown", *_OPTIONAL):
        if min(getattr(times, name), default=1.0) < 1:
            raise BenchError(f"{path}: times.{name} must be at least 1")
