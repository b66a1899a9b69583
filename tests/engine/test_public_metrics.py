"""Metrics for scrapers that have no API key."""

from tests.engine.test_access import (
    ALICE,
    COMPLETE,
    KEY_OPTIONS,
    SIDES,
    open_client,
    send,
)


@SIDES
async def test_public_metrics_need_no_key_and_open_nothing_else(side, tokenizer):
    options = {**KEY_OPTIONS, "public_metrics": True}
    async with open_client(side, tokenizer, **options) as client:
        assert (await send(client, "GET /metrics")).status_code == 200
        assert (await send(client, "GET /metrics", x_api_key=ALICE)).status_code == 200
        for line in ("GET /stats", "GET /v1/models", "GET /metrics/", COMPLETE):
            assert (await send(client, line)).status_code == 401
