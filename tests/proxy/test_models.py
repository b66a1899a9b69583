"""Several models behind one endpoint, and servers whose KV does not mean the same."""

import asyncio
import itertools

import pytest

from tests.proxy.fakes import Fake, Rig, Waits, answers, decodes, prefills, until

A, B = {"model": "a", "kv_digest": "1.1.1"}, {"model": "b", "kv_digest": "2.1.1"}


def two_models() -> Rig:
    prefill = [
        Fake(prefills, told=A, max_model_len=90),
        Fake(prefills, told=B, max_model_len=70),
    ]
    decode = [Fake(decodes, told=told, max_model_len=90) for told in (A, B, A)]
    return Rig(prefill, decode)


async def test_the_body_s_model_chooses_the_servers_of_both_legs():
    async with two_models() as rig:
        for model, times in (("a", 4), ("b", 3)):
            for _ in range(times):
                assert (await rig.complete(model=model)).status_code == 200
        assert [len(fake.calls) for fake in rig.prefill] == [4, 3]
        assert [len(fake.calls) for fake in rig.decode] == [
            2,
            3,
            2,
        ]  # each model has its turns
        asked = await rig.client.post("/tokenize", json={"model": "b", "prompt": "x"})
        assert (asked.status_code, len(rig.decode[1].calls)) == (200, 4)
        listed = (await rig.client.get("/v1/models")).json()["data"]
        assert [(each["id"], each["max_model_len"]) for each in listed] == [
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
async def test_an_unknown_or_missing_name_is_answered_with_those_known(
    path, body, status, code
):
    async with two_models() as rig:
        asked = (
            rig.client.get(path) if body is None else rig.client.post(path, json=body)
        )
        answer = await asked
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (
            status,
            code,
            "model",
        )
        assert '"a", "b"' in error["message"]
        assert not any(fake.calls for fake in (*rig.prefill, *rig.decode))


async def test_one_model_needs_no_name_and_its_servers_may_be_away():
    async with Rig([], [Fake(decodes, told=A)], fixed_series=False) as rig:
        assert (
            await rig.client.post("/v1/completions", json={"prompt": "x"})
        ).status_code == 200
        assert (await rig.complete(model="b")).status_code == 404
        rig.decode[0].ready = False
        await until(lambda: not rig.is_ready(0))
        assert (await rig.complete(model="a")).status_code == 503
        (card,) = (await rig.client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("a", None)
        assert (await rig.client.get("/v1/models/a")).json() == card
        silent = {
            "role": "prefill",
            "url": "http://127.0.0.1:1",
        }  # has told no name, and is alone
        assert (await rig.client.post("/admin/members", json=silent)).status_code == 200
        assert (await rig.complete(model="b")).status_code == 404


# -- servers that are unlike


@pytest.mark.parametrize(
    ("prefill", "decode", "pairs"),
    [
        (["1.1.1"], ["1.1.1"], {(0, 0)}),
        (["1.1.1"], ["1.1.*"], {(0, 0)}),
        (["1.1.1"], ["1.1.2"], set()),
        (["1.1.1", "1.1.2"], ["1.1.1", "1.1.2"], {(0, 0), (1, 1)}),
        (["1.1.1", "1.2.1"], ["1.1.1"], {(0, 0)}),
        (["1.1.1"], ["1.2.1", "1.1.1"], {(0, 1)}),
        (["1.1.1"], [""], {(0, 0)}),  # of a version that does not tell
    ],
)
async def test_only_servers_whose_kv_means_the_same_are_paired(prefill, decode, pairs):
    def fakes(digests: list[str], kind: str) -> list[Fake]:
        behave = {"p": prefills, "d": decodes}[kind]
        return [
            Fake(behave, told={"model": "m", "kv_digest": each}) for each in digests
        ]

    async with Rig(fakes(prefill, "p"), fakes(decode, "d")) as rig:
        found = set()
        for number in range(4):
            assert (
                await rig.complete({"x-request-id": f"r{number}"})
            ).status_code == 200
            asked = [
                [at for at, fake in enumerate(fakes) if _last_id(fake) == f"r{number}"]
                for fakes in (rig.prefill, rig.decode)
            ]
            found |= set(itertools.product(*asked))
        assert found == pairs
        assert rig.decode_only("incompatible") == (0 if pairs else 4)


def _last_id(fake: Fake) -> str:
    return fake.calls[-1].headers["x-request-id"] if fake.calls else ""


async def test_kv_goes_back_where_its_only_reader_went_meanwhile():
    slow = Waits(prefills)
    like, unlike = (
        Fake(decodes, told={"model": "m", "kv_digest": d}) for d in ("1.1.1", "1.2.1")
    )
    p = Fake(slow, told={"model": "m", "kv_digest": "1.1.1"})
    async with Rig([p], [like, unlike]) as rig:
        request = asyncio.create_task(rig.complete())
        await slow.begun.wait()
        like.pages["/ready"] = answers(503, {"model": "m"})
        await until(lambda: not rig.is_ready(1))
        slow.go.set()
        assert (await request).status_code == 200
        (call,) = unlike.calls
        assert "kv_transfer_params" not in call.body
        await until(lambda: len(p.releases) == 1)
        assert rig.decode_only("incompatible") == 1
