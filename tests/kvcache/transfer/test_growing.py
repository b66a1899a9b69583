"""Pulls of prompts that P is still computing.

Sockets and workers are real. A block holds garbage until its chunk is computed.
"""

import random
import socket
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvcache.transfer.pulls.lease_client import new_id
from kvcache.transfer.pulls.messages import PullBegun, PullDone, PullFailed, PullSealed
from protocol.errors import KVCorrupt, PullTimeout
from protocol.messages import RemotePrefill
from tests.rigs.memory_pair import (
    PATIENT,
    REMOTE,
    Decode,
    Prefill,
    assert_pulled,
    expected,
    fill,
)

NUM_TOKENS = 61


class Prompt:
    """A prompt that P computes in chunks. Its n-th block is block (3n mod 31) + 1 of
    the pool.
    """

    def __init__(
        self, prefill: Prefill, name: str = "t", *, is_announced: bool = True
    ) -> None:
        self.prefill = prefill
        self.name = name
        size = prefill.layouts[0].block_size
        self.blocks = [3 * n % 31 + 1 for n in range(-(-NUM_TOKENS // size))]
        self.num_done = 0
        host, port = prefill.server.address
        self.remote = replace(
            REMOTE,
            host=host,
            port=port,
            engine_id=prefill.metadata.engine_id,
            incarnation=prefill.metadata.incarnation,
            lease_id="",
            lease_s=60.0,
            block_ids=[],
            block_size=0,
            num_tokens=NUM_TOKENS,
            tp_size=0,
            first_tokens=[],
            sender_releases=True,
            transfer_id=name,
            prompt_digest="d",
        )
        for pool in prefill.pools:
            pool.canonical.fill_(-1.0)
        if is_announced:
            self.announce()

    def announce(self) -> None:
        """Makes P's lease server expect the prompt, so that a reader can subscribe."""
        size = self.prefill.layouts[0].block_size
        with self.prefill.server.offers() as (offers, now):
            offers.expect(self.name, "r", "d", 60.0, size, now)

    @property
    def has_readers(self) -> bool:
        with self.prefill.server.offers() as (offers, _):
            return offers.num_leased_blocks(self.name) is not None

    @property
    def is_computed(self) -> bool:
        return self.num_done == len(self.blocks)

    @property
    def num_computed_tokens(self) -> int:
        return self.num_done * self.prefill.layouts[0].block_size

    def compute(self, num_tokens: int) -> bool:
        """Computes a chunk of the prompt. The last chunk completes it.

        Returns:
            Whether the chunk was leased to a reader.
        """
        count = max(1, num_tokens // self.prefill.layouts[0].block_size)
        stop = min(self.num_done + count, len(self.blocks))
        for rank, pool in enumerate(self.prefill.pools):
            before = pool.canonical.clone()
            fill(pool, rank, self.prefill.tp, self.prefill.heads)
            for block in set(range(32)).difference(self.blocks[:stop]):
                pool.canonical[block] = before[block]
        self.num_done = stop
        ends = stop == len(self.blocks)
        if not (self.has_readers or ends):
            return False
        with self.prefill.server.offers() as (offers, now):
            first = len(offers.leased_blocks(self.name))
            lease_id = offers.grow(
                self.name, new_id(), self.blocks[first:stop], now, seals=ends
            )
            if ends:
                offers.finish(self.name, lease_id, self.blocks, b"reference", now)
        return bool(lease_id)

    @property
    def final_remote(self) -> RemotePrefill:
        size = self.prefill.layouts[0].block_size
        return replace(self.remote, block_ids=self.blocks, block_size=size)


def until_read(decode: Decode, prompt: Prompt, start: int, stop: int) -> None:
    """Waits until D has these tokens and its READs have ended. A READ ends a little
    later than its bytes arrive, and until then it can still be spoiled.
    """
    blocks = local_blocks(decode)
    expected_tokens = expected(prompt.final_remote, start, stop, decode.heads)

    def is_read() -> bool:
        has_tokens = np.array_equal(decode.tokens(blocks, start, stop), expected_tokens)
        return has_tokens and not decode.agents[0].active

    decode.until(is_read)


def drop_connections(prefill: Prefill) -> None:
    """Closes all connections of P's lease server, as if the network had reset them."""
    for wire in list(prefill.server._wires):
        wire._socket.shutdown(socket.SHUT_RDWR)


def local_blocks(decode: Decode) -> list[int]:
    per_block = decode.layouts[0].block_size * decode.dcp
    return [5 * n % 31 + 1 for n in range(-(-NUM_TOKENS // per_block))]


GEOMETRIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"block_size": 4, "order": "LCBNHD"}, {"block_size": 16}),
    ({"block_size": 16}, {"block_size": 4, "tp": 2}),
    ({"tp": 2, "block_size": 4}, {"block_size": 8, "tp": 4, "dcp": 2, "heads": 2}),
    ({"block_size": 8}, {"block_size": 8, "staging_bytes": 1 << 16, "order": "LCBHND"}),
]


@pytest.mark.parametrize(
    ("subscribes_at", "pulls_at"), [(0, 0), (0, 2), (1, 1), (9, 9)]
)
@pytest.mark.parametrize("geometry_index", range(len(GEOMETRIES)))
def test_computed_blocks_are_read_while_the_rest_is_computed(
    rig, geometry_index, subscribes_at, pulls_at
):
    prefill_options, decode_options = GEOMETRIES[geometry_index]
    heads = {"heads": decode_options["heads"]} if "heads" in decode_options else {}
    verify = ("off", "sample", "all")[(geometry_index + pulls_at) % 3]
    prefill = rig(Prefill, digests=True, **prefill_options, **heads)
    decode = rig(Decode, verify=verify, **decode_options)
    prompt = Prompt(prefill, is_announced=subscribes_at > 0)
    blocks = local_blocks(decode)
    per_block = decode.layouts[0].block_size * decode.dcp
    start = per_block * (geometry_index % 2)
    for chunk in range(10):
        if chunk == subscribes_at:
            decode.coordinator.hold("a", prompt.remote)
            if not chunk:
                prompt.announce()
        if chunk == pulls_at:
            decode.coordinator.pull("a", prompt.remote, start, NUM_TOKENS, blocks)
        if subscribes_at <= chunk and not prompt.is_computed:
            decode.until(lambda: prompt.has_readers)
        if not prompt.is_computed:
            prompt.compute(random.Random(chunk).randint(1, 3) * 8)
        num_available = prompt.num_computed_tokens // per_block * per_block
        if pulls_at <= chunk and start < num_available < NUM_TOKENS:
            until_read(decode, prompt, start, num_available)
    assert decode.wait(PullSealed).reference == b"reference"
    done = decode.done("a")
    assert done.nbytes > 0 and done.verified == verify
    assert_pulled(decode, prompt.final_remote, blocks, start, NUM_TOKENS)
    assert prefill.outcomes() == ["completed"] and decode.wait(PullBegun)


def subscribed(
    rig: Any, verify: str = "off", **settings: float
) -> tuple[Prefill, Decode, Prompt]:
    """Returns both sides and a prompt. D's pull "a" has read one chunk of 16 tokens of
    the prompt.
    """
    prefill = rig(Prefill, digests=verify != "off")
    decode = rig(Decode, verify=verify, settings={**PATIENT, **settings})
    prompt = Prompt(prefill)
    decode.coordinator.pull("a", prompt.remote, 0, NUM_TOKENS, local_blocks(decode))
    decode.until(lambda: prompt.has_readers)
    assert prompt.compute(16)
    until_read(decode, prompt, 0, 16)
    return prefill, decode, prompt


def test_a_wrong_bit_in_one_chunk_fails_the_pull(rig):
    _, decode, prompt = subscribed(rig, "all")
    decode.agents[0].spoil()
    assert prompt.compute(8)
    error = decode.wait_for_error("a")
    assert isinstance(error, KVCorrupt) and "tokens 16 to 23" in error.message


def test_pull_fails_if_the_lender_stops_computing_the_prompt(rig):
    """P's lease server still answers, so only the timeout ends the pull. P's blocks are
    freed.
    """
    prefill, decode, _ = subscribed(rig, pull_timeout_s=0.3, renew_interval_s=0.05)
    assert isinstance(decode.wait_for_error("a"), PullTimeout)
    decode.until(lambda: prefill.server.counters()["held"] == 0)


def test_only_one_of_two_borrowers_gets_a_growing_lease(rig):
    """Both borrowers read, but the first fence ends the lease. So the second pull
    fails.
    """
    prefill, decode, prompt = subscribed(rig)
    other = rig(Decode)
    other.coordinator.pull("b", prompt.remote, 0, NUM_TOKENS, local_blocks(other))
    other.wait(PullBegun)
    prompt.compute(99)
    ends = [decode.wait(PullDone, PullFailed), other.wait(PullDone, PullFailed)]
    (done,) = [end for end in ends if isinstance(end, PullDone)]
    reader = decode if done.pull_id == "a" else other
    assert_pulled(reader, prompt.final_remote, local_blocks(decode), 0, NUM_TOKENS)
    assert prefill.outcomes() == ["completed"]


def test_borrower_receives_missed_progress_after_a_lost_connection(rig):
    prefill, decode, prompt = subscribed(rig, renew_interval_s=0.05)
    drop_connections(prefill)
    decode.until(lambda: prompt.has_readers)
    prompt.compute(99)
    decode.done("a")
    assert_pulled(decode, prompt.final_remote, local_blocks(decode), 0, NUM_TOKENS)
