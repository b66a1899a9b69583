"""Engines that repeat offers whose pulls have ended."""

from typing import Any

from engine.store.demotions import MAX_ACTIVE
from tests.rigs.engines import Engine
from tests.rigs.shadow import VOCAB
from tests.rigs.stores import Store, TieredGroup

PROMPT = [(7 * i) % VOCAB for i in range(30)]
OTHER = [(11 * i + 3) % VOCAB for i in range(30)]


def test_repeated_offers_of_an_ended_pull_hold_no_block_of_the_region():
    store = Store()
    engine = Engine(store_link=store.link())
    demote = engine.coordinator.demote
    offers: list[Any] = []

    def record(*offer: Any) -> None:
        offers.append(offer)
        demote(*offer)

    engine.coordinator.demote = record
    demotions = store.region.demotions
    with TieredGroup(store, engine) as group:
        group.complete(engine, PROMPT, 1)
        group.until_stored(PROMPT, 28)
        group.settle()
        for _ in range(MAX_ACTIVE):
            demote(*offers[0])
        group.until(lambda: demotions.outcomes["failed"] == MAX_ACTIVE)
        group.settle()
        group.complete(engine, OTHER, 1)
        group.until_stored(OTHER, 28)
