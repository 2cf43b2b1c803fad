"""The requests of an elastic job's processes to horovodrun's driver, whose own server answers them here."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from horovod_volo.elastic.job import DriverLostError, ElasticJob

RANKS = 300


class Driver:
    """The server of the driver, and what it was asked."""

    def __init__(self, port: int = 0) -> None:
        self.asked = asked = Counter[str]()

        class Counting(RendezvousHandler):  # type: ignore[misc]
            def _get_value(self, scope: str, key: str) -> Any:
                asked[f"{scope}/{key}"] += 1
                return super()._get_value(scope, key)

        self.server: ThreadingHTTPServer = RendezvousHTTPServer(("127.0.0.1", port), Counting, False)
        self.server.init([])  # type: ignore[attr-defined]
        self.port = self.server.server_address[1]
        self.values: dict[str, dict[str, bytes]] = self.server.cache  # type: ignore[attr-defined]
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def driver() -> Iterator[Driver]:
    running = Driver()
    yield running
    running.close()


@pytest.fixture
def job(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> ElasticJob:
    variables = {
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(driver.port),
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_START_TIMEOUT": "30",
        "HOROVOD_SIZE": str(RANKS),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    return ElasticJob()


def all_there(job: ElasticJob, driver: Driver, seconds: float, values: dict[str, bytes]) -> bool:
    """Let the driver have these values of /there after some seconds; return what the rank learns."""

    def add() -> None:
        driver.asked.clear()
        time.sleep(seconds)
        driver.values.setdefault("there", {}).update(values)

    thread = threading.Thread(target=add)
    thread.start()
    found = job._all_there()
    thread.join()
    return found


def test_a_rank_asks_the_less_often_the_more_ranks_there_are(
    job: ElasticJob, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks together ask as often as a few: the driver's server answers 2,400 requests a second."""
    monkeypatch.setenv("HOROVOD_RANK", "1")
    assert all_there(job, driver, 0.5, {"all": b"1"})
    assert driver.asked["there/all"] <= 3


def test_rank_0_asks_for_one_missing_rank_at_a_time(
    job: ElasticJob, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert all_there(job, driver, 0.5, {str(rank): b"id" for rank in range(1, RANKS)})
    assert sum(driver.asked.values()) <= RANKS + 20
    assert driver.values["there"]["all"] == b"1"


def test_rank_0_gives_up_when_a_rank_does_not_come(
    job: ElasticJob, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    job.start_seconds = 0.3
    assert not all_there(job, driver, 0.0, {str(rank): b"id" for rank in range(2, RANKS)})
    assert driver.values["there"]["all"] == b""


def test_a_refused_connection_is_tried_again(job: ElasticJob, driver: Driver) -> None:
    driver.close()
    again: list[Driver] = []
    timer = threading.Timer(0.2, lambda: again.append(Driver(driver.port)))
    timer.start()
    assert job.pass_on("PUT", "/there/1", b"id")[0] == HTTPStatus.OK
    assert job.pass_on("GET", "/there/1") == (HTTPStatus.OK, b"id")
    timer.join()
    again[0].close()


def test_a_driver_that_is_gone_is_lost(
    job: ElasticJob, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod_volo.elastic.job._RETRIES", 1)
    driver.close()
    with pytest.raises(DriverLostError, match="Connection refused"):
        job.pass_on("GET", "/there/1")
