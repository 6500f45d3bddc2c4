"""What a publishing rank checks and follows beside its publisher."""

import pytest

from slimebus.bus.errors import ConfigError
from trainer.publish.publication import check_reach


def test_a_rank_on_another_host_must_not_serve_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "0")
    check_reach("tcp://127.0.0.1:0")
    monkeypatch.setenv("GROUP_RANK", "1")
    check_reach("tcp://0.0.0.0:5600")
    with pytest.raises(ConfigError, match=r"weights.weights_bind tcp://127.0.0.1:0 can only be reached from this host"):
        check_reach("tcp://127.0.0.1:0")
