"""A process that reads by NIXL between two agents of its own and prints by what UCX did it."""

import numpy as np

from kvcache.transfer.link.agent import ReadState
from kvcache.transfer.link.nixl_agent import NixlAgent
from kvcache.transfer.link.ucx_log import ucx_log

here, there = NixlAgent("here"), NixlAgent("there")
memory = [np.zeros(1 << 20, np.uint8) for _ in range(2)]
for agent, array in zip((here, there), memory, strict=True):
    agent.register(array.ctypes.data, array.nbytes)
peer = here.add_peer(there.metadata())
target, source = (np.array([array.ctypes.data]) for array in memory)
handle = here.read(peer, target, source, np.array([1 << 20]))
while here.poll(handle) is ReadState.ACTIVE:
    pass
here.release(handle)
print(ucx_log.read_between(gpu_here=False, gpu_there=False))
here.close()
there.close()
