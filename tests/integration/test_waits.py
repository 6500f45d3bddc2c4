"""Waits that outlast a client's resends, its deadline and one request."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_broker import LiveBroker

from slimebus.bus import messages as m
from slimebus.client import consumer
from slimebus.client.consumer import Consumer

pytestmark = pytest.mark.integration


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveBroker]:
    with LiveBroker(tmp_path) as broker:
        yield broker


def test_a_trainer_that_sends_its_request_again_and_again_hears_what_it_waits_for(live: LiveBroker) -> None:
    trainer = live.client("t", "trainer")
    trainer.call(m.Resume(step=0, version=0, lineage="L"))
    reply = trainer.call(m.Batch(step=0, wait_s=2.0), timeout_s=8.0).expect(m.BatchReply)
    assert reply.reason == "trainer waits for batch 0: 0 of 32 groups ready; no rollout worker is connected"


def test_a_consumer_may_wait_longer_than_one_request_does(live: LiveBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "LONGEST_ASK_S", 0.5)
    with Consumer(live.address, name="critic") as critic:
        assert critic.read(wait_s=1.6) == []
        assert live.status()["consumers"][0]["name"] == "critic"
