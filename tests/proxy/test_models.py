"""Several models behind one endpoint, and servers with incompatible KV."""

import asyncio
import itertools

import pytest

from tests.proxy.fakes import Fake, Rig, Waits, answers, decodes, prefills, until

MODEL_A = {"model": "a", "kv_digest": "1.1.1"}
MODEL_B = {"model": "b", "kv_digest": "2.1.1"}


def two_models() -> Rig:
    prefill = [
        Fake(prefills, details=MODEL_A, max_model_len=90),
        Fake(prefills, details=MODEL_B, max_model_len=70),
    ]
    decode = [
        Fake(decodes, details=details, max_model_len=90)
        for details in (MODEL_A, MODEL_B, MODEL_A)
    ]
    return Rig(prefill, decode)


async def test_model_in_the_body_determines_the_servers_of_both_legs():
    async with two_models() as rig:
        for model, times in (("a", 4), ("b", 3)):
            for _ in range(times):
                assert (await rig.complete(model=model)).status_code == 200
        assert [len(fake.calls) for fake in rig.prefill] == [4, 3]
        # The servers of each model take turns.
        assert [len(fake.calls) for fake in rig.decode] == [2, 3, 2]
        body = {"model": "b", "prompt": "x"}
        response = await rig.client.post("/tokenize", json=body)
        assert (response.status_code, len(rig.decode[1].calls)) == (200, 4)
        listed = (await rig.client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in listed] == [
            ("a", 90),
            ("b", 90),
        ]
        assert (await rig.client.get("/v1/models/b")).json() == listed[1]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", {"model": "c"}, 404, "model_not_found"),
        ("/tokenize", {"model": "c"}, 404, "model_not_found"),
        ("/v1/models/c", None, 404, "model_not_found"),
        ("/v1/completions", {}, 400, "invalid_request"),
        ("/v1/chat/completions", {"model": 5}, 400, "invalid_request"),
        ("/detokenize", {}, 400, "invalid_request"),
    ],
)
async def test_error_for_an_unknown_or_missing_model_lists_the_models(
    path, body, status, code
):
    async with two_models() as rig:
        if body is None:
            response = await rig.client.get(path)
        else:
            response = await rig.client.post(path, json=body)
        error = response.json()["error"]
        assert response.status_code == status
        assert (error["code"], error["param"]) == (code, "model")
        assert '"a", "b"' in error["message"]
        assert not any(fake.calls for fake in (*rig.prefill, *rig.decode))


async def test_single_model_needs_no_name_and_is_listed_without_ready_servers():
    async with Rig([], [Fake(decodes, details=MODEL_A)], fixed_series=False) as rig:
        response = await rig.client.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 200
        assert (await rig.complete(model="b")).status_code == 404
        rig.decode[0].ready = False
        await until(lambda: not rig.is_ready(0))
        assert (await rig.complete(model="a")).status_code == 503
        (card,) = (await rig.client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("a", None)
        assert (await rig.client.get("/v1/models/a")).json() == card
        # A server that has never reported its model might serve any model.
        unreachable = {"role": "prefill", "url": "http://127.0.0.1:1"}
        response = await rig.client.post("/admin/members", json=unreachable)
        assert response.status_code == 200
        assert (await rig.complete(model="b")).status_code == 404


# -- servers with incompatible KV


@pytest.mark.parametrize(
    ("prefill", "decode", "pairs"),
    [
        (["1.1.1"], ["1.1.1"], {(0, 0)}),
        (["1.1.1"], ["1.1.*"], {(0, 0)}),
        (["1.1.1"], ["1.1.2"], set()),
        (["1.1.1", "1.1.2"], ["1.1.1", "1.1.2"], {(0, 0), (1, 1)}),
        (["1.1.1", "1.2.1"], ["1.1.1"], {(0, 0)}),
        (["1.1.1"], ["1.2.1", "1.1.1"], {(0, 1)}),
        (["1.1.1"], [""], {(0, 0)}),  # a server of an older version reports no digest
    ],
)
async def test_only_servers_with_compatible_kv_are_paired(prefill, decode, pairs):
    def fakes(digests: list[str], kind: str) -> list[Fake]:
        behave = {"p": prefills, "d": decodes}[kind]
        return [
            Fake(behave, details={"model": "m", "kv_digest": digest})
            for digest in digests
        ]

    async with Rig(fakes(prefill, "p"), fakes(decode, "d")) as rig:
        used_pairs = set()
        for number in range(4):
            request_id = f"r{number}"
            response = await rig.complete({"x-request-id": request_id})
            assert response.status_code == 200
            used = [
                _positions(fakes, request_id) for fakes in (rig.prefill, rig.decode)
            ]
            used_pairs |= set(itertools.product(*used))
        assert used_pairs == pairs
        assert rig.decode_only("incompatible") == (0 if pairs else 4)


def _positions(fakes: list[Fake], request_id: str) -> list[int]:
    """Return the indices of the fakes whose last request was this one."""
    return [
        index
        for index, fake in enumerate(fakes)
        if fake.calls and fake.calls[-1].headers["x-request-id"] == request_id
    ]


async def test_kv_is_released_if_its_only_reader_leaves_during_the_prefill():
    slow = Waits(prefills)
    prefill = Fake(slow, details={"model": "m", "kv_digest": "1.1.1"})
    reader = Fake(decodes, details={"model": "m", "kv_digest": "1.1.1"})
    other = Fake(decodes, details={"model": "m", "kv_digest": "1.2.1"})
    async with Rig([prefill], [reader, other]) as rig:
        request = asyncio.create_task(rig.complete())
        await slow.begun.wait()
        reader.pages["/ready"] = answers(503, {"model": "m"})
        await until(lambda: not rig.is_ready(1))
        slow.go.set()
        assert (await request).status_code == 200
        (call,) = other.calls
        assert "kv_transfer_params" not in call.body
        await until(lambda: len(prefill.releases) == 1)
        assert rig.decode_only("incompatible") == 1
