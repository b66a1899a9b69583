"""Runs a server. The `kv_transfer_params` of each request select its leg.

Prefill and decode servers differ only in the defaults of their options, so `serve` runs
both kinds of servers.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from engine.http.api import ServerHooks
from engine.http.legs.decode_leg import DecodeLeg
from engine.http.legs.prefill_leg import PrefillLeg
from engine.nodes.member import run_member
from engine.serve import RANK_MODULE, run_server
from protocol import kv_offers, kv_params
from protocol.errors import KVParamsRejected
from protocol.messages import AddRequest, EngineInput, EngineReady, TokenDelta
from protocol.openai.sampling import GenerationRequest
from protocol.settings.settings import EngineSettings, parse


def serve(
    settings_class: type[EngineSettings],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
) -> int:
    """Run a server until a signal or POST /drain ends the server.

    On a node other than node 0, run only the ranks of this node.

    Args:
        settings_class: the server's options and their defaults.
        argv: the command-line arguments; None: the arguments of this process.
        prog: the command's name in `--help` and in errors.

    Returns:
        The process's exit status.
    """
    settings = parse(settings_class, argv, prog=prog)
    if settings.node_rank > 0:
        run_member(settings, RANK_MODULE)

    def make_hooks(secret: bytes) -> ServerHooks:
        return EitherLeg(
            secret,
            settings.kv_load_failure_policy,
            uses_machine_secret=settings.cluster_secret is None,
            is_reachable=settings.advertised_side_channel_host is not None,
        )

    return run_server(settings, make_hooks)


class EitherLeg(ServerHooks):
    """Applies the hooks of the leg that a request's `kv_transfer_params` select.

    Args:
        secret: the cluster secret.
        policy: --kv-load-failure-policy: `recompute` the prompt if a reference to KV is
            unusable, or `fail` the request.
        uses_machine_secret: whether the secret was read from a file of this machine,
            because no option sets it.
        is_reachable: whether this server has an address at which other servers can read
            its KV.
    """

    def __init__(
        self,
        secret: bytes,
        policy: str,
        *,
        uses_machine_secret: bool = False,
        is_reachable: bool = True,
    ) -> None:
        self._secret = secret
        self._policy = policy
        self._prefill = PrefillLeg(is_reachable=is_reachable)
        self._decode = DecodeLeg(
            secret, policy, uses_machine_secret=uses_machine_secret
        )

    def prepare(
        self, request: GenerationRequest, adds: list[AddRequest], ready: EngineReady
    ) -> list[AddRequest]:
        params = request.kv_transfer_params
        if isinstance(params, dict) and kv_params.is_prefill_request(params):
            prepared = self._prefill.prepare(request, adds, ready)
        else:
            prepared = self._decode.prepare(request, adds, ready)
        return self._with_hint(params, prepared)

    def _with_hint(self, params: object, adds: list[AddRequest]) -> list[AddRequest]:
        """Add the proxy's hint, which names an engine that may hold the prompts' KV.

        With the policy `recompute`, a hint that has expired or has a wrong signature is
        dropped, and the reason is recorded in `kv_rejected`.

        Raises:
            KVParamsRejected: the hint is malformed, or the policy is `fail` and the
                hint has expired or has a wrong signature.
        """
        try:
            hint = kv_offers.hint_of(params, self._secret, time.time())
        except KVParamsRejected as error:
            is_malformed = not (error.param or "").endswith(("signature", "issued_s"))
            if self._policy == "fail" or is_malformed:
                raise
            return [replace(add, kv_rejected=error.message) for add in adds]
        if hint is None:
            return adds
        return [replace(add, hint=hint) for add in adds]

    def admit(
        self,
        adds: Sequence[AddRequest],
        ready: EngineReady,
        kv_transfer_params: object = None,
    ) -> Callable[[], None]:
        return self._prefill.admit(adds, ready, kv_transfer_params)

    def release_messages(self, kv_transfer_params: object) -> Sequence[EngineInput]:
        return [
            *self._prefill.release_messages(kv_transfer_params),
            *self._decode.release_messages(kv_transfer_params),
        ]

    def response_members(self, last_deltas: Sequence[TokenDelta]) -> dict[str, Any]:
        return self._prefill.response_members(last_deltas)
