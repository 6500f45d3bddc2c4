"""A live broker process under hostile messages, or a flood of harmless ones, with a well-behaved worker and trainer beside it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from load_attack import LoadAttack
from outage import outage

MESSAGES = 40_000
"""`bin/chaos --hostile 100000` takes its time."""
FLOOD_S = 3.0
"""`bin/chaos --floods 50` takes its time."""
MAX_GROWTH_BYTES = 64 << 20
"""Buffers of sockets, which fill up to their bounds once; with 150,000 messages more it stays where it is."""
BUSY_PERCENT = 35.0
"""Where other work takes so much of the processors, a share of throughput says more of it than of the broker."""
MAX_LOG_BYTES = 256 << 10
AWAY_S = 10.0
"""`bin/chaos --outage 60` takes its time."""


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_a_broker_under_attack_neither_dies_nor_grows_and_serves_others_at_half_speed_or_better(tmp_path: Path) -> None:
    with LoadAttack(tmp_path) as attack:
        report = attack.nonsense(MESSAGES)
    print(report)
    assert report.is_alive
    assert report.messages >= MESSAGES
    assert report.problems == [], "nobody who behaves is refused anything"
    assert report.answers > 1000, "what can be answered is answered"
    assert report.rss_after - report.rss_before < MAX_GROWTH_BYTES
    assert report.log_bytes < MAX_LOG_BYTES
    if report.others_percent < BUSY_PERCENT:
        assert report.share > 0.5, f"{report.shares} of the quiet throughput"


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_a_flood_of_status_requests_whose_askers_vanish_costs_others_less_than_half_and_no_memory(tmp_path: Path) -> None:
    with LoadAttack(tmp_path) as attack:
        report = attack.flood(FLOOD_S, floods=2)
    print(report)
    assert report.is_alive
    assert report.messages > 2 * FLOOD_S * 1000
    assert report.problems == []
    assert report.rss_most - report.rss_before < MAX_GROWTH_BYTES
    assert report.log_bytes < MAX_LOG_BYTES
    if report.others_percent < BUSY_PERCENT:
        assert report.share > 0.5, f"{report.shares} of the quiet throughput"


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_three_seconds_after_an_outage_a_lease_takes_no_longer_than_before(tmp_path: Path) -> None:
    found = outage(tmp_path, AWAY_S)
    print(found)
    assert found.num_leases > 50
    assert found.after_p99_s < max(0.05, 3 * found.before_p99_s), "a loaded machine slows both"
