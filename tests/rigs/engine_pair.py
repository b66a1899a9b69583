"""A prefill and a decode engine in one process. `RealPair` runs a real model on both.

Tests make parts of the engines fail. Even then, the output of a request must be the
continuation of its prompt.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from protocol import kv_params
from protocol.messages import (
    AbortRequest,
    AddRequest,
    RemotePrefill,
    SamplingParams,
    TokenDelta,
)
from tests.ports import reserved_ports
from tests.rigs.engines import SECRET, Engine, Group, _names
from tests.rigs.memory_pair import run_round
from tests.rigs.real_engine import RealEngine
from tests.rigs.shadow import MemoryTransport, add

_SHARED_OPTIONS = {
    "depth",
    "verify",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
}


class Pair(Group):
    """A lending engine P and a borrowing engine D. A test drives both, one round at a
    time.

    Args:
        make: function that creates an engine.
        lease_s: duration of P's leases. P's clock is `now_s`, which only the test
            advances.
        options: options of the engines. Names with the prefix "p_" are for P, those in
            _SHARED_OPTIONS for both engines, all others for D.
    """

    def __init__(
        self,
        *,
        make: Callable[..., Engine] = Engine,
        lease_s: float = 30.0,
        rng: random.Random | None = None,
        **options: Any,
    ) -> None:
        self._ports = ExitStack()
        self._make = make
        # P keeps its port when it restarts.
        (port,) = self._ports.enter_context(reserved_ports(1))
        self.now_s = 1000.0  # P's clock
        shared: dict[str, Any] = {"rng": rng or random.Random(0)}
        p_options: dict[str, Any] = {}
        d_options: dict[str, Any] = {}
        for name, value in options.items():
            if name.startswith("p_"):
                p_options[name.removeprefix("p_")] = value
            else:
                d_options[name] = value
            if name in _SHARED_OPTIONS:
                shared[name] = value
        self._p_options = {
            **shared,
            **p_options,
            "lease_s": lease_s,
            "lease_clock": lambda: self.now_s,
            "port": port,
        }
        # These engines are kept, because a READ that hangs may still refer to their
        # memory.
        self._ended_engines: list[Engine] = []
        self.d = make(**{**shared, **d_options})
        self._start_prefill()
        self.coordinator = self.d.coordinator
        self.workers = self.d.workers

    def _start_prefill(self) -> None:
        self.p = self._make(**self._p_options)
        self.leases = self.p.leases
        self.engines = [self.p, self.d]

    def restart_prefill(self) -> None:
        """End P and start a new engine at P's address."""
        self.p.end()
        self._ended_engines.append(self.p)
        self._start_prefill()

    def close(self) -> None:
        super().close()
        self._ports.close()

    def prefill(self, prompt: Sequence[int], **members: Any) -> dict[str, Any]:
        """Run the prompt on P. Return the kv_transfer_params of the answer."""
        name = self.begin(self.p, prompt, 1, retain_kv=True, **members)
        self.until(lambda: bool(self.p.out.terminals(name)))
        params = self.p.out.terminals(name)[0].kv_transfer_params
        assert params is not None
        return params

    def submit(
        self,
        prompt: Sequence[int],
        params: dict[str, Any] | None = None,
        max_tokens: int = 6,
        sampling: SamplingParams | None = None,
        *,
        aborted: bool = False,
        redrawn: bool = False,
        **members: Any,
    ) -> str:
        """Submit a request to D, with a reference to P's KV. Return the request's name.

        Args:
            params: the reference. If it is None, P computes the prompt first.
            redrawn: remove the first tokens from the reference, so that D must draw
                them itself.
            aborted: abort the request in the round in which it is submitted.
        """
        name = f"d{next(_names)}"
        params = self.prefill(prompt) if params is None else params
        parsed = kv_params.parse(params)
        parsed.verify(SECRET)
        lent = kv_params.sender_releases(params)
        remote = kv_params.to_remote_prefill(parsed, sender_releases=lent)
        if redrawn:
            remote = replace(remote, first_tokens=[])
        request = add(name, prompt, max_tokens, sampling, remote=remote, **members)
        messages: list[Any] = [request]
        if aborted:
            messages.append(AbortRequest(name))
        self.d.core.round(messages)
        return name

    def submit_to_both(
        self,
        prompt: Sequence[int],
        max_tokens: int = 6,
        *,
        order: str = "pd",
        p_sampling: SamplingParams | None = None,
        transfer_id: str = "",
        **members: Any,
    ) -> tuple[str, str]:
        """Submit a request to P and to D. Return its names on P and on D.

        Args:
            order: "p" and "d" submit to that side, in this order; "." runs rounds until
                P has answered. A side that is left out gets no request.
        """
        number = next(_names)
        p_name = f"p{number}"
        d_name = f"d{number}"
        p_fields = ("stop_token_ids", "num_choices", "sampling")
        p_members = {name: members[name] for name in p_fields if name in members}
        if p_sampling:
            p_members["sampling"] = p_sampling
        remote = self.p.offer(transfer_id or p_name, prompt)
        p_request = add(
            p_name,
            prompt,
            1,
            retain_kv=True,
            transfer_id=remote.transfer_id,
            **p_members,
        )
        d_request = add(d_name, prompt, max_tokens, remote=remote, **members)
        for side in order:
            if side == "p":
                self.p.core.round([p_request])
            elif side == "d":
                self.d.core.round([d_request])
                run_round(self.coordinator)
            else:
                self.until(lambda: bool(self.p.out.terminals(p_name)))
        return p_name, d_name

    def skip(self, seconds: float) -> None:
        """Advance the coordinator's clock, so that pulls in progress time out."""
        self.d.clock.skip(seconds)
        run_round(self.coordinator)

    def terminal_delta(self, name: str) -> TokenDelta:
        """Return the terminal delta of a request on D, which must have exactly one."""
        return self.end_of(self.d, name)

    def wait_for_failure(self, name: str, code: str) -> str:
        """Return the message of the error that ends a request on D. The error must have
        this code.
        """
        error = self.terminal_delta(name).error
        assert error is not None and error.code == code
        return error.message

    def answer(self, name: str) -> list[int]:
        (tokens,) = self.answers(name, 1)
        return tokens

    def answers(self, name: str, num_choices: int) -> list[list[int]]:
        self.until(lambda: len(self.d.out.terminals(name)) == num_choices)
        assert all(end.error is None for end in self.d.out.terminals(name))
        return [self.d.out.tokens(name, choice) for choice in range(num_choices)]


class RealPair(Pair):
    """A pair that runs `model` in float32, one request at a time."""

    def __init__(self, model: Path, **options: Any) -> None:
        super().__init__(make=partial(RealEngine, model), **options)

    def prefill_and_decode(self, request: AddRequest) -> MemoryTransport:
        """Run a request on P, then on D with P's reference. Return the messages of D's
        core.
        """
        return self.decode_only(replace(request, remote=self.reference(request)))

    def reference(self, request: AddRequest) -> RemotePrefill:
        """Run the prompt of a request on P. Return the reference to its KV."""
        name = f"p{next(_names)}"
        self.p.core.round(
            [replace(request, request_id=name, max_tokens=1, retain_kv=True)]
        )
        self.until(lambda: len(self.p.out.terminals(name)) == request.num_choices)
        offered = self.p.out.terminals(name)[0].kv_transfer_params
        params = kv_params.parse(offered)
        params.verify(SECRET)
        digest = kv_params.sampling_digest(request.sampling, request.stop_token_ids)
        assert params.sampling_digest == digest
        return kv_params.to_remote_prefill(params)

    def decode_only(self, request: AddRequest) -> MemoryTransport:
        out = MemoryTransport()
        self.d.out = out
        self.d.core.transport = out
        name = f"d{next(_names)}"  # names of pulls must be unique
        self.d.core.round([replace(request, request_id=name)])
        self.until(lambda: len(out.terminals(name)) == request.num_choices)
        assert all(end.error is None for end in out.terminals(name))
        out.deltas = [
            replace(delta, request_id=request.request_id) for delta in out.deltas
        ]
        return out
