"""Elastic runs: when hosts are lost or added, the ranks are formed again, and go on from the state in memory.

Each rank keeps its state after the last step that it has completed. A step needs the exchanges of all ranks,
so some ranks may have completed one that others have not; then all go on from the later state. Nothing of
that step is missing in it, and no other step is lost.
"""

import gc
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.collectives import leave_ranks
from horovod_volo.cluster.entry import FAILED, LOST, run_on_ranks
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.watchdog import Watchdog
from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.config.schema import Config, by_flag
from horovod_volo.core.errors import UserError, print_error
from horovod_volo.elastic.job import DriverLostError, ElasticJob, RemovedError
from horovod_volo.elastic.ledger import Ledger, LedgerStep
from horovod_volo.engine.callbacks import Callback
from horovod_volo.engine.checkpoint.files import StateDicts
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.run import LAUNCHES, Start, Train
from horovod_volo.engine.state import TrainState

_MOST_IN_VAIN = 5


class Reached(NamedTuple):
    """How far a rank has come when the ranks are formed again."""

    step: int
    formed: int  # how often the ranks had been formed
    in_vain: int  # how often in a row without a step in between
    scaler: dict[str, Any]
    ledger: list[LedgerStep]


class ElasticRun(Callback):
    """What a process takes along from one set of ranks to the next."""

    def __init__(self, job: ElasticJob) -> None:
        self.job = job
        self.ledger = Ledger()
        self.formed = 0  # how often this run's ranks were formed before
        self.resumes = False  # whether the run had begun, but no rank has its state: it is in a checkpoint
        self._failed: UserError | None = None  # in a callback, before the ranks were formed again
        self._began = False
        self._progress: Reached | None = None
        self._tensors: StateDicts = {}
        self._root = 0  # the rank that has come furthest
        self._newest: Reached | None = None

    def started(self, run: TrainContext) -> None:
        if self.formed:
            run.log(describe(self.formed, run.step, run.hosts))
        self.forget()  # not before: a rank may be lost while the run is set up

    def step_done(self, run: TrainContext) -> None:
        run.callbacks.failed = run.callbacks.failed or self._failed  # raised when this state is saved
        if self.job.hosts_changed:
            run.state.reducer.statistics.note_changed_hosts()

    def ranks_lost(self, run: TrainContext) -> None:
        """Keep the state after the last complete step, unless it was being loaded from a checkpoint."""
        state, newest = run.state, self._newest
        if run.callbacks.failed is not None:  # without its traceback, which keeps the model in memory
            self._failed = self._failed or UserError(str(run.callbacks.failed))
        if state.step < 0:
            return
        statistics = state.reducer.statistics
        for outcome in statistics.outcomes(of_all=True):
            if outcome.own.step <= state.step:
                self.ledger.step_agreed(run, outcome)
        statistics.restore()  # the step under way has changed them
        self._tensors = {
            file: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            for file, tensors in state.full_state_dict().items()
        }
        in_vain = newest.in_vain + 1 if newest and newest.step == state.step else 0
        scaler, steps = state.scaler.state_dict(), self.ledger.latest()
        self._progress = Reached(state.step, self.formed + 1, in_vain, scaler, steps)

    def find_newest(self, world: World) -> Reached | None:
        """Return the progress of the rank that has come furthest; None at the start of a run. Collective."""
        by_rank: list[tuple[bool, Reached | None]] = world.allgather_object((self._began, self._progress))
        reached = [(progress.step, -rank) for rank, (_, progress) in enumerate(by_rank) if progress]
        self._root = -max(reached)[1] if reached else 0
        newest = self._newest = by_rank[self._root][1]
        self.formed = newest.formed if newest else self.formed
        self._began = any(began for began, _ in by_rank)  # a newcomer to the run learns it
        self.resumes = self._began and newest is None
        self.ledger = Ledger(newest.ledger if newest else ())
        if newest is not None and newest.in_vain > _MOST_IN_VAIN:
            raise AllRanksError(
                f"The ranks were formed again {newest.in_vain} times in a row without completing a step, so "
                f"this run ends at step {newest.step}. Resume from its last checkpoint with --resume auto."
            )
        return newest

    def take_over(self, state: TrainState, world: World) -> None:
        """Load the state of the rank that has come furthest. Collective: every rank calls this."""
        assert self._newest is not None
        saved = self._tensors if world.rank == self._root else {}
        state.load_full_state_dict(saved, self._newest.scaler, self._newest.step, world, self._root)
        world.assert_identical(state.replicated_tensors(), "Weights or optimizer state")

    def forget(self) -> None:
        """Drop what was kept: the run has begun, and its ranks may be lost again."""
        self._progress, self._tensors, self._began = None, {}, True

    def train(self, config: Config, world: World, watchdog: Watchdog, train: Train) -> int:
        """Train with these ranks, from where those before were; return the exit status."""
        world.collectives.heartbeat = watchdog.heartbeat
        watchdog.heartbeat.begin("looking for the newest state")
        newest = self.find_newest(world)
        start = Start(self.job.name, self.job.has_this, self.take_over if newest else None, self.resumes)
        return train(config, world, [self.ledger, self], start)


def describe(formed: int, step: int, hosts: Sequence[str]) -> str:
    """Describe the ranks that have just been formed, again so often."""
    by_host = ", ".join(f"{count} on {host}" for host, count in Counter(hosts).items())
    return f"formed again ({formed}): {len(hosts)} ranks ({by_host}) go on after step {step}"


def train_elastic(config: Config, watchdog: Watchdog, bound: Binding, train: Train) -> int:
    """Train with the ranks that there are, as often as these change; return the exit status."""
    elastic = ElasticRun(ElasticJob())
    while True:
        watchdog.heartbeat.begin("leaving the ranks of before")
        leave_ranks()
        watchdog.heartbeat.watch(0.0)  # the driver waits for other hosts as long as it has been told to
        try:
            elastic.job.join()
        except RemovedError:
            print_error(f"rank {read_launch_env().rank} ends: the others go on without its host")
            # At once, and not with status 0: if its host is back by then, the driver would take the end of
            # this process for that of the new one, and success for the end of the job.
            os._exit(FAILED)
        except DriverLostError as error:
            print_error(f"rank {read_launch_env().rank} stops: {error}")
            return FAILED
        watchdog.watch_ranks(read_launch_env().rank, [], Path())
        work = partial(elastic.train, config, watchdog=watchdog, train=train)
        status = run_on_ranks(work, bound, by_flag(config), ranks_change=True)
        if status != LOST:
            return status
        gc.collect()  # the model and its buckets, before they are built again
        torch.cuda.empty_cache()


LAUNCHES.register("elastic", train_elastic)
