"""Several engines pull the KV of a prompt while another engine computes the prompt.

Each of these engines may fail.
"""

import random

import pytest

from kvcache.transfer.pulls.messages import PullSettings
from protocol.messages import AbortRequest
from tests.rigs.engines import Engine, Group
from tests.rigs.shadow import VOCAB, add, expected_output

PROMPT = [(7 * i * i + 3 * i) % VOCAB for i in range(45)]
SHORT_TIMEOUTS = PullSettings(
    lookup_timeout_s=0.3,
    side_channel_timeout_s=0.2,
    drain_grace_s=0.01,
    fence_timeout_s=0.3,
)


def _begin(group: Group, p: Engine, readers: list[Engine]) -> list[str]:
    """Sends the prompt to P, and a request for the prompt's KV to each reader. Returns
    the names of the readers' requests.
    """
    remote = p.offer("x", PROMPT)
    prompt = add("p", PROMPT, 1, retain_kv=True, transfer_id=remote.transfer_id)
    p.core.round([prompt])
    return [group.begin(reader, PROMPT, 5, remote=remote) for reader in readers]


def _assert_expected_tokens(
    group: Group, readers: list[Engine], names: list[str]
) -> None:
    for reader, name in zip(readers, names, strict=True):
        assert group.tokens_of(reader, name) == expected_output(PROMPT, 5)


SLOW = {"max_num_batched_tokens": 8}  # computes the prompt in several steps


def test_two_readers_of_one_growing_lease_both_send_the_expected_tokens(make_group):
    """The first reader that has all KV ends the lease. The other reader computes the
    missing tokens.
    """
    group = make_group(SLOW, {"block_size": 8}, {"block_size": 2})
    p, *readers = group.engines
    _assert_expected_tokens(group, readers, _begin(group, p, readers))
    assert sum(reader.stat("baton_kv_transfer_bytes") for reader in readers) > 0
    assert p.stat("baton_leases", event="granted") == 1


@pytest.mark.parametrize("num_rounds", range(1, 7))
def test_lender_that_ends_between_two_chunks_fails_no_request(make_group, num_rounds):
    group = make_group(SLOW, *[{"settings": SHORT_TIMEOUTS}] * 2)
    p, *readers = group.engines
    names = _begin(group, p, readers)
    group.round(num_rounds)
    group.engines.remove(p)
    p.end()
    _assert_expected_tokens(group, readers, names)


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_right_after_random_faults_of_readers_and_lender(make_group, seed):
    rng = random.Random(seed)
    sizes = [
        {"block_size": rng.choice([2, 4, 8]), "settings": SHORT_TIMEOUTS}
        for _ in range(3)
    ]
    group = make_group({"num_blocks": 30, **SLOW}, *sizes)
    p, *readers = group.engines
    names = _begin(group, p, readers)
    aborted = set[str]()
    for i in range(30):
        reader = rng.randrange(len(readers))
        match rng.randrange(9):
            case 0:
                readers[reader].movers.stall()
            case 1:
                readers[reader].movers.fail()
            case 2 if len(aborted) < 2:
                readers[reader].core.round([AbortRequest(names[reader])])
                aborted.add(names[reader])
            case 3:
                p.core.round([AbortRequest("p")])
            case 4:  # another request evicts cached blocks
                p.core.round([add(f"other{i}", [i, *PROMPT[:20]], 2)])
            case 5:  # P still computes the hinted prefix, or has evicted it
                name = group.begin(readers[reader], PROMPT, 5, hint=p.hint(40))
                readers.append(readers[reader])
                names.append(name)
            case _:
                readers[reader].movers.resume()
        group.round()
    for reader in readers:
        reader.movers.resume()
        reader.movers.fail(0)
    group.end_of(p, "p")
    # The proxy also aborts a prefill if no server pulls its KV any more.
    p.core.round([AbortRequest("p")])
    remaining = [
        (reader, name)
        for reader, name in zip(readers, names, strict=True)
        if name not in aborted
    ]
    _assert_expected_tokens(group, *map(list, zip(*remaining, strict=True)))
