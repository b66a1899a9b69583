"""Servers refuse configurations that cannot work on this machine's GPUs.

The refusal is at the start or at the handshake, and names the reason and the option
that helps. Pairs on different kinds of devices are tested here, too.
"""

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.e2e.matrix import post
from tests.gpu.models import supported_model_dir
from tests.rigs.client import prefill
from tests.rigs.cluster import Server, start, start_decode, start_prefill, wait_until

pytestmark = pytest.mark.gpu

_GPU = ("--device", "cuda", "--dtype", "bfloat16", "--max-num-seqs", "4")
_CPU = ("--device", "cpu", "--dtype", "bfloat16")
_REFUSED = {
    "a GPU that is not there": (
        ("--devices", "77"),
        r"GPU 77, but this machine has .*--devices",
    ),
    "a second GPU that is not there": (
        ("--tp", "2", "--devices", "0,77"),
        r"GPU 77, but this machine has .*--devices",
    ),
    "a pool larger than the GPU": (
        ("--kv-cache-tokens", "4000000000"),
        r"MiB, but the GPU has .*lower --kv-cache-tokens",
    ),
    "no room under the utilization": (
        ("--gpu-memory-utilization", "0.001"),
        r"MiB are missing for one block of 64 tokens; raise --gpu-memory-utilization",
    ),
    "a context that the pool cannot hold": (
        ("--kv-cache-tokens", "64", "--max-model-len", "512"),
        r"448 tokens are missing; raise --kv-cache-tokens",
    ),
    "a dtype that the kernels lack": (
        ("--dtype", "float32", "--attention-backend", "flashinfer"),
        r"float32.*use --dtype bfloat16.*--attention-backend torch",
    ),
}


def _start_refused(argv: tuple[str, ...]) -> str:
    """Starts a server that must refuse to start. Returns the reason that it prints."""
    options = ["--port", "0", "--served-model-name", "test-model", *_GPU, *argv]
    try:
        server = start(
            "decode_server", "--model", str(supported_model_dir("gqa4")), *options
        )
    except AssertionError as error:
        return str(error)
    server.stop()
    return "it started"


@pytest.fixture(scope="module")
def reasons() -> Iterator[dict[str, Future[str]]]:
    """Starts all refused servers concurrently, because imports take most of the time.
    Yields a future of the reason that each server prints.
    """
    with ThreadPoolExecutor(len(_REFUSED)) as pool:
        yield {
            name: pool.submit(_start_refused, argv)
            for name, (argv, _) in _REFUSED.items()
        }


@pytest.mark.parametrize("name", _REFUSED)
def test_server_that_cannot_work_ends_with_the_reason(reasons, name):
    reason = reasons[name].result()
    assert re.search(_REFUSED[name][1], reason, re.DOTALL), reason


@pytest.fixture(scope="module")
def pairs_on_different_devices() -> Iterator[list[tuple[Server, Server]]]:
    """Pairs with P and D on different kinds of devices, configured for mapped memory
    only.
    """
    model = supported_model_dir("gqa4")
    pinned = ["--transfer", "mapped", "--kv-load-failure-policy", "fail"]
    with ThreadPoolExecutor(4) as pool:
        starts = [
            pool.submit(start_prefill, model, *_CPU),
            pool.submit(start_decode, model, *_GPU, *pinned),
            pool.submit(start_prefill, model, *_GPU),
            pool.submit(start_decode, model, *_CPU, *pinned),
        ]
        servers = [future.result() for future in starts]
    yield [(servers[0], servers[1]), (servers[2], servers[3])]
    for server in servers:
        server.stop()


def test_gpu_maps_the_kv_of_a_peer_in_host_memory(pairs_on_different_devices):
    prefiller, decoder = pairs_on_different_devices[0]
    prompt = list(range(5, 80))
    answer = post(decoder.url, prompt, 4, prefill(prefiller.url, prompt, logprobs=1))
    assert answer.status_code == 200, answer.text
    mapped = 'baton_kv_transfers_total{outcome="done",path="mapped"}'
    assert decoder.metrics()[mapped] == 1
    wait_until(decoder.all_blocks_free)


def test_kv_on_a_gpu_cannot_be_mapped_by_a_server_without_one(
    pairs_on_different_devices,
):
    prefiller, decoder = pairs_on_different_devices[1]
    prompt = list(range(5, 80))
    answer = post(decoder.url, prompt, 4, prefill(prefiller.url, prompt, logprobs=1))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (502, "peer_incompatible")
    message = (
        "cannot be mapped: the peer's KV is in cuda memory.*Use --transfer auto or nixl"
    )
    assert re.search(message, error["message"]), error["message"]
    wait_until(decoder.all_blocks_free)
