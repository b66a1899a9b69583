"""Requests wait for a decode server that is being restarted, up to a time limit."""

import asyncio
from typing import Any

import pytest

from tests.proxy.fakes import Call, Fake, Rig, decodes, drops, until

SECRET = "a secret of this test"


def rig_of(fake: Fake, **settings: Any) -> Rig:
    return Rig([], [fake], cluster_secret=SECRET, **settings)


async def test_request_whose_server_dies_before_its_answer_waits_for_the_restart():
    async def dies_once(call: Call) -> None:
        fake.ready = False
        fake.behave = decodes
        await drops(call)

    fake = Fake(dies_once)
    async with rig_of(fake, resume_wait_s=60.0) as rig:
        request = asyncio.create_task(rig.complete())
        await until(lambda: fake.behave is decodes and not rig.is_ready(0))
        assert not request.done()
        fake.ready = True
        assert (await request).status_code == 200
        assert len(fake.calls) == 2


async def test_new_request_waits_until_a_server_is_ready_again():
    fake = Fake(decodes)
    async with rig_of(fake, resume_wait_s=60.0) as rig:
        fake.ready = False
        await until(lambda: not rig.is_ready(0))
        request = asyncio.create_task(rig.complete())
        polls = fake.polls
        await until(lambda: fake.polls > polls + 3)
        assert not request.done()
        fake.ready = True
        assert (await request).status_code == 200


@pytest.mark.parametrize(
    "settings",
    [{}, {"resume_wait_s": 0.1}, {"resume_wait_s": 60.0, "max_queue_s": 0.1}],
    ids=["no option", "--resume-wait-s is over", "--max-queue-s is over"],
)
async def test_new_request_is_refused_if_no_server_is_ready_in_time(settings):
    fake = Fake(decodes)
    async with rig_of(fake, **settings) as rig:
        fake.ready = False
        await until(lambda: not rig.is_ready(0))
        answer = await rig.complete()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_server_available"


async def test_request_that_kills_its_server_again_and_again_ends():
    async def dies(call: Call) -> None:
        fake.ready = False
        await drops(call)

    async def restart() -> None:
        while True:
            await until(lambda: not rig.is_ready(0))
            fake.ready = True
            await until(lambda: rig.is_ready(0))

    fake = Fake(dies)
    async with rig_of(fake, resume_wait_s=60.0) as rig:
        restarting = asyncio.create_task(restart())
        answer = await rig.complete()
        restarting.cancel()
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "decode_server_lost"
        assert len(fake.calls) == 2


async def test_requests_for_a_launcher_are_refused_without_one():
    async with rig_of(Fake(decodes)) as rig:
        body = {"role": "decode", "count": 2}
        for answer in (
            await rig.client.post("/admin/scale", json=body),
            await rig.client.get("/admin/cluster"),
        ):
            assert answer.status_code == 400
            assert "was not started by `baton up`" in answer.json()["error"]["message"]
        report = {"id": "", "problem": "", "parts": []}
        assert (await rig.client.post("/admin/cluster", json=report)).status_code == 200
        assert (await rig.client.get("/admin/cluster")).json() == report
        answer = await rig.client.post("/admin/scale", json={**body, "count": 65})
        assert answer.status_code == 400 and "count" in answer.text
