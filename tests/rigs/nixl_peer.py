"""A process that holds readable memory over NIXL: prints where it is, then lives until stdin ends.

Usage: nixl_peer.py NBYTES ; byte i of the memory is pattern(NBYTES)[i].
"""

import base64
import json
import os
import sys

import numpy as np
import numpy.typing as npt


def pattern(nbytes: int) -> npt.NDArray[np.uint8]:
    return (np.arange(nbytes, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8)


def main() -> None:
    from kvcache.transfer.link.nixl_agent import NixlAgent

    memory = pattern(int(sys.argv[1]))
    agent = NixlAgent("peer")
    agent.register(memory.ctypes.data, memory.nbytes)
    record = {"metadata": base64.b64encode(agent.metadata()).decode()}
    print(json.dumps({**record, "address": memory.ctypes.data}), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
