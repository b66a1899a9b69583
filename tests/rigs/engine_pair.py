"""A prefill and a decode engine in one process. `RealPair` has a real model on both sides.

Whatever goes wrong, the output must be the continuation of the request's own prompt.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from protocol import kv_params
from protocol.messages import AbortRequest, AddRequest, SamplingParams, TokenDelta
from tests.ports import reserved_ports
from tests.rigs.engines import SECRET, Engine, Group, RealEngine, _names
from tests.rigs.memory_pair import run_round
from tests.rigs.shadow import MemoryTransport, add

_OF_BOTH = {
    "depth",
    "verify",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
}


class Pair(Group):
    """P lends and D borrows, driven by hand round by round.

    Args:
        make: an engine.
        lease_s: of P's leases, by a clock that is moved by hand.
        options: of P as "p_...", of both if in _OF_BOTH, all others of D.
    """

    def __init__(
        self,
        *,
        make: Callable[..., Engine] = Engine,
        lease_s: float = 30.0,
        rng: random.Random | None = None,
        **options: Any,
    ) -> None:
        self._ports, self._make = ExitStack(), make
        (port,) = self._ports.enter_context(
            reserved_ports(1)
        )  # P's, also after its restart
        self.now_s = 1000.0  # P's clock, moved by hand
        both = {name: value for name, value in options.items() if name in _OF_BOTH}
        of_p = {
            name[2:]: value for name, value in options.items() if name.startswith("p_")
        }
        of_d = {
            name: value for name, value in options.items() if not name.startswith("p_")
        }
        common = {"rng": rng or random.Random(0), **both}
        time = {"lease_s": lease_s, "lease_clock": lambda: self.now_s, "port": port}
        self._of_p = {**common, **of_p, **time}
        self._gone: list[Engine] = []  # whose memory a READ that hangs may still name
        self.d = make(**{**common, **of_d})
        self._start_prefill()
        self.coordinator, self.workers = self.d.coordinator, self.d.workers

    def _start_prefill(self) -> None:
        self.p = self._make(**self._of_p)
        self.leases, self.engines = self.p.leases, [self.p, self.d]

    def restart_prefill(self) -> None:
        """P ends, and another one comes at its address."""
        self.p.end()
        self._gone.append(self.p)
        self._start_prefill()

    def close(self) -> None:
        super().close()
        self._ports.close()

    def prefill(self, prompt: Sequence[int], **members: Any) -> dict[str, Any]:
        """Runs the prompt on P and returns what it would answer."""
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
        """Gives D the request with its reference, which P is asked for if there is none (`redrawn`:
        without first tokens), and an abort at once if told so; returns its name."""
        name = f"d{next(_names)}"
        params = self.prefill(prompt) if params is None else params
        parsed = kv_params.parse(params)
        parsed.verify(SECRET)
        lent = kv_params.sender_releases(params)
        remote = kv_params.to_remote_prefill(parsed, sender_releases=lent)
        remote = replace(remote, first_tokens=[]) if redrawn else remote
        request = add(name, prompt, max_tokens, sampling, remote=remote, **members)
        self.d.core.round([request, AbortRequest(name)] if aborted else [request])
        return name

    def both(
        self,
        prompt: Sequence[int],
        max_tokens: int = 6,
        *,
        order: str = "pd",
        p_sampling: SamplingParams | None = None,
        transfer_id: str = "",
        **members: Any,
    ) -> tuple[str, str]:
        """Asks P and D at once, or in this order with rounds between; returns their names of it."""
        number, told = next(_names), {"stop_token_ids", "num_choices", "sampling"}
        names = f"p{number}", f"d{number}"
        asked = {name: value for name, value in members.items() if name in told}
        asked |= {"sampling": p_sampling} if p_sampling else {}
        remote = self.p.offer(transfer_id or names[0], prompt)
        ours = add(
            names[0], prompt, 1, retain_kv=True, transfer_id=remote.transfer_id, **asked
        )
        theirs = add(names[1], prompt, max_tokens, remote=remote, **members)
        for side in order:
            if side == "p":
                self.p.core.round([ours])
            elif side == "d":
                self.d.core.round([theirs])
                run_round(self.coordinator)
            else:
                self.until(lambda: bool(self.p.out.terminals(names[0])))
        return names

    def skip(self, seconds: float) -> None:
        """Pulls that take longer by the coordinator's clock take too long."""
        self.d.clock.skip(seconds)
        run_round(self.coordinator)

    def end(self, name: str) -> TokenDelta:
        """The one end of a request of D."""
        return self.end_of(self.d, name)

    def failed(self, name: str, code: str) -> str:
        """The message of the error that ended a request."""
        error = self.end(name).error
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
    """Both engines run `model` in float32; requests are answered one at a time."""

    def __init__(self, model: Path, **options: Any) -> None:
        super().__init__(make=partial(RealEngine, model), **options)

    def prefill_and_decode(self, request: AddRequest) -> MemoryTransport:
        """What D sends with P's reference."""
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
        return self.decode_alone(
            replace(request, remote=kv_params.to_remote_prefill(params))
        )

    def decode_alone(self, request: AddRequest) -> MemoryTransport:
        out = self.d.out = self.d.core.transport = MemoryTransport()
        name = f"d{next(_names)}"  # a pull's name is used once
        self.d.core.round([replace(request, request_id=name)])
        self.until(lambda: len(out.terminals(name)) == request.num_choices)
        assert all(end.error is None for end in out.terminals(name))
        out.deltas = [
            replace(delta, request_id=request.request_id) for delta in out.deltas
        ]
        return out
