"""What a rank takes along when ranks are formed again, and how it asks horovodrun's driver for its rank."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
from small_runs import small_run

from horovod_volo.bench.synthetic import SyntheticRun, bench_config, flat_weights
from horovod_volo.cluster.collectives import Collectives, RankLostError
from horovod_volo.cluster.watchdog import Watchdog
from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.config.schema import Config
from horovod_volo.elastic.job import DriverLostError, ElasticJob
from horovod_volo.elastic.run import ElasticRun, Reached, describe
from horovod_volo.engine.callbacks import Callback
from horovod_volo.engine.checkpoint.files import write_checkpoint
from horovod_volo.engine.checkpoint.resuming import restore_state
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.run import Start
from horovod_volo.engine.run import run as engine_run


class OtherRanks(Collectives):
    """Rank 0 of three, of which the others have come this far."""

    def __init__(self, *others: Reached | None, began: bool = False) -> None:
        self.others = [(began, progress) for progress in others]

    def allgather_object(self, value: Any) -> list[Any]:
        return [value, *self.others]


def new_run() -> SyntheticRun:
    return SyntheticRun(bench_config(model="volo_demo", img_size=32, batch_size=2, ema_decay=0.9))


def reached(step: int, in_vain: int = 0) -> Reached:
    return Reached(step, formed=2, in_vain=in_vain, scaler={}, ledger=[])


def test_the_rank_that_has_come_furthest_is_found() -> None:
    world = World(size=3, collectives=OtherRanks(reached(7), reached(8)))
    elastic = ElasticRun(job=None)  # type: ignore[arg-type]
    assert elastic.find_newest(world) == reached(8)
    assert elastic.formed == 2
    text = describe(elastic.formed, 8, ["a", "b", "a"])
    assert text == "formed again (2): 3 ranks (2 on a, 1 on b) go on after step 8"


def test_a_newcomer_learns_that_the_run_had_begun() -> None:
    """As when a rank is lost while a checkpoint is loaded: rank 0 selects it, and may be a newcomer."""
    elastic = ElasticRun(job=None)  # type: ignore[arg-type]
    assert elastic.find_newest(World(size=3, collectives=OtherRanks(None, None))) is None
    assert not elastic.resumes  # a new run
    assert elastic.find_newest(World(size=3, collectives=OtherRanks(None, None, began=True))) is None
    assert elastic.resumes
    assert elastic.find_newest(World.single()) is None  # the others are lost before the run goes on
    assert elastic.resumes


def test_formations_without_a_step_are_counted_and_end_the_run() -> None:
    elastic = ElasticRun(job=None)  # type: ignore[arg-type]
    with closing(new_run()) as run:
        run.step()
        for _ in range(6):
            elastic.ranks_lost(run.context)
            elastic.find_newest(World.single())
        elastic.ranks_lost(run.context)
        with pytest.raises(AllRanksError, match="formed again 6 times in a row without completing a step"):
            elastic.find_newest(World.single())
        run.step()
        elastic.ranks_lost(run.context)  # a step in between: the count begins again
        assert elastic.find_newest(World.single()).in_vain == 0


def test_a_state_that_is_loaded_in_part_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As when a rank is lost while the others return to a checkpoint, on which they go on then."""
    elastic = ElasticRun(job=None)  # type: ignore[arg-type]
    with closing(new_run()) as run:
        run.step()
        state = run.context.state
        checkpoint = write_checkpoint(tmp_path, 1, state.full_state_dict(), {})
        run.step()
        with monkeypatch.context() as patch:
            patch.setattr(state.reducer, "scatter_optimizer_state", lost_rank)
            with pytest.raises(RankLostError):
                restore_state(state, checkpoint, World.single(), step=2)
        elastic.forget()
        elastic.ranks_lost(run.context)
        assert elastic.find_newest(World.single()) is None
        assert elastic.resumes
        restore_state(state, checkpoint, World.single(), step=2)
        elastic.ranks_lost(run.context)
        assert elastic.find_newest(World.single()).step == 2


def lost_rank(*_: object) -> None:
    raise RankLostError


def test_an_error_in_a_callback_outlives_the_ranks_of_its_step(tmp_path: Path) -> None:
    """It is raised by the ranks that are formed next, once they have saved and stopped."""

    class RaisesOnce(Callback):
        def __init__(self, error: type[Exception]) -> None:
            self.error = error

        def step_done(self, run: TrainContext) -> None:
            if run.step == 2:
                raise self.error

    config, stop = small_run(tmp_path, train=16), StopRequest()
    elastic = ElasticRun(SimpleNamespace(name="job", has_this=lambda: True, hosts_changed=False))  # type: ignore[arg-type]
    own = [RaisesOnce(ZeroDivisionError), RaisesOnce(RankLostError)]

    def train(config: Config, world: World, callbacks: Sequence[Callback], start: Start) -> int:
        return engine_run(config, world, stop, watchdog, [*callbacks, *own], start=start)

    with closing(Watchdog(0.0, ranks_change=True)) as watchdog:
        with pytest.raises(RankLostError):
            elastic.train(config, World.single(), watchdog, train)
        with pytest.raises(AllRanksError, match="RaisesOnce failed in step_done: ZeroDivisionError"):
            elastic.train(config, World.single(), watchdog, train)
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step_00000003").is_dir()


def test_the_state_of_the_last_complete_step_is_kept() -> None:
    """Batch-norm statistics that the forward of the next step has changed already are not taken along."""
    with closing(new_run()) as run, closing(new_run()) as other:
        for _ in range(3):
            run.step()
        state = run.context.state
        expected = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
        averaged = [buffer for buffer in state.model.buffers() if buffer.is_floating_point()]
        averaged[0].add_(1.0)
        elastic = ElasticRun(job=None)  # type: ignore[arg-type]
        elastic.ranks_lost(run.context)
        assert elastic.find_newest(World.single()) is not None
        elastic.take_over(other.context.state, World.single())
        elastic.take_over(other.context.state, World.single())  # a rank was lost while the run was set up
        assert other.context.state.step == 3
        for name, tensor in other.context.state.model.state_dict().items():
            assert tensor.equal(expected[name]), name
        run.step()
        other.step()
        assert torch.equal(flat_weights(run.context.state.model), flat_weights(other.context.state.model))


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


def test_a_rank_asks_the_less_often_the_more_ranks_there_are(job, driver, monkeypatch):
    """All ranks together ask as often as a few: the driver's server answers 2,400 requests a second."""
    monkeypatch.setenv("HOROVOD_RANK", "1")
    assert all_there(job, driver, 0.5, {"all": b"1"})
    assert driver.asked["there/all"] <= 3


def test_rank_0_asks_for_one_missing_rank_at_a_time(job, driver, monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert all_there(job, driver, 0.5, {str(rank): b"id" for rank in range(1, RANKS)})
    assert sum(driver.asked.values()) <= RANKS + 20
    assert driver.values["there"]["all"] == b"1"


def test_rank_0_gives_up_when_a_rank_does_not_come(job, driver, monkeypatch):
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


def test_a_driver_that_is_gone_is_lost(job, driver, monkeypatch):
    monkeypatch.setattr("horovod_volo.elastic.job._RETRIES", 1)
    driver.close()
    with pytest.raises(DriverLostError, match="Connection refused"):
        job.pass_on("GET", "/there/1")
