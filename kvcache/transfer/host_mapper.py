"""The mapped path between processes of one host without GPUs: strided copies out of P's pool.

One pass moves any geometry into any other at the speed of memory; a READ through shared memory is a
copy as well, so staging would copy twice. P's pool is a memory file (shared_memory.py) that is
mapped read-only here; a launch is a chunk of the staged path whose slot is P's own pool. Launches
run one after another in a thread of their own, without the interpreter's lock.
"""

import ctypes
from itertools import pairwise

import numpy as np
import torch

from kvcache.pool import KVPool
from kvcache.shared_memory import NotShared, OpenedMemory
from kvcache.transfer import reformat
from kvcache.transfer.boxes import Transfer, cut_tokens
from kvcache.transfer.gather import Gather
from kvcache.transfer.mapper import MappedMemory, Mapper, NotMappable, Work, offered
from kvcache.transfer.staged import Chunk, Move, Region
from protocol.handshake import RankMetadata

CHUNK_BYTES = 16 << 20  # 2 to 4 ms of copying


class HostMapper(Mapper):
    """Copies into `pool`, which is on the CPU."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._opened: dict[int, OpenedMemory] = {}  # by address

    def map(self, rank: RankMetadata) -> MappedMemory:
        record = offered(rank)
        if rank.device_kind != "cpu" or record.fd < 0:
            raise NotMappable(f"its KV is in {rank.device_kind} memory that is not shared")
        try:
            memory = OpenedMemory(record.pid, record.fd, record.token, rank.nbytes)
        except NotShared as error:
            raise NotMappable(str(error)) from error
        address = memory.address
        self._opened[address] = memory
        return MappedMemory(address, address)

    def unmap(self, memory: MappedMemory) -> None:
        self._opened.pop(memory.address).close()

    def begin(self, work: Work) -> Work:
        return work

    def launch(self, work: Work, index: int, first: int, count: int) -> None:
        gather = work.gathers[index]
        chunk = make_chunk(gather, work.transfer, first, count)
        nbytes = work.transfer.remote[gather.share.remote_rank].layout.nbytes
        memory = (ctypes.c_ubyte * nbytes).from_address(work.sources[index].address)
        source = torch.frombuffer(memory, dtype=torch.uint8)
        reformat.apply(chunk, source, self._pool.tensor)

    def finished(self, token: None) -> bool:
        return True


def make_chunk(gather: Gather, transfer: Transfer, first: int, count: int) -> Chunk:
    """Blocks [first, first + count) of a gather, to be placed out of the owner's whole pool."""
    share = gather.share
    source, target = transfer.remote[share.remote_rank].layout, transfer.local.layout
    region = Region(
        source,
        int(share.parameters[0]) * share.unit_elements * source.itemsize,
        int(share.parameters[1]) * share.unit_elements,
        share.num_heads,
    )
    moves = _moves(gather, transfer, first, count)
    return Chunk((), source.nbytes, moves, (region,), target, transfer.factors)


def _moves(gather: Gather, transfer: Transfer, first: int, count: int) -> tuple[Move, ...]:
    theirs = transfer.remote[gather.share.remote_rank].layout.block_size
    ours = transfer.local.layout.block_size
    step = gather.share.block_step
    begin = gather.ordinal(first)
    end = begin + (count - 1) * step + 1  # ordinals in the sequence of blocks of P
    starts, tokens = cut_tokens(
        max(transfer.token_start, begin * theirs),
        min(transfer.token_stop, end * theirs),
        theirs,
        ours,
    )
    mine = (starts // theirs - begin) % step == 0  # other owners have the blocks between
    starts, tokens = starts[mine], tokens[mine]
    key = (starts % theirs * 257 + starts % ours) * 257 + tokens  # each is at most a block
    order = np.argsort(key, kind="stable")
    starts, tokens, key = starts[order], tokens[order], key[order]
    borders = [*np.flatnonzero(np.diff(key, prepend=-1)).tolist(), len(key)]
    return tuple(
        Move(
            int(starts[low] % theirs),
            int(starts[low] % ours),
            int(tokens[low]),
            1,
            transfer.remote_blocks[starts[low:high] // theirs],
            transfer.local_blocks[starts[low:high] // ours],
        )
        for low, high in pairwise(borders)
    )
