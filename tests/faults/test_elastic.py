"""Elastic runs on one machine, of which two names count as two hosts: a killed rank comes back."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import weakref
from pathlib import Path

import pytest
import torch

from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.derived import resolve
from horovod_volo.config.recipe import assemble
from horovod_volo.config.update_settings import Exchange
from horovod_volo.core.errors import UserError
from horovod_volo.elastic.ledger import check_ledger
from horovod_volo.train import main
from tests.faults.elastic_run import on_this_machine
from tests.ranks.board_reading import check_board
from tests.runs import state

THREADS_THAT_COME_AND_GO = 2
FORMATIONS = int(os.environ.get("ELASTIC_FORMATIONS", "20"))
HOSTS = "localhost:1,127.0.0.1:1"


@pytest.fixture(scope="module")
def images(demo_images) -> Path:
    return demo_images(60, 10)  # 6 steps of 10 images


def test_a_killed_rank_is_replaced_and_a_removed_host_is_left(images, tmp_path):
    """It stops early: so small a learning rate changes no prediction, and the first evaluation is best."""
    still = ("--lr", "1e-12", "--min-lr", "0", "--warmup-epochs", "0")
    still += ("--freeze", "patch_embed,network.0,head")
    flags = ("--global-batch", "10", "--epochs", "48", "--eval-every", "8", "--early-stop", "3", *still)
    with on_this_machine(tmp_path, images, HOSTS, *flags, plain=False) as trial:
        trial.train_on(2)
        trial.signal_rank("127.0.0.1", signal.SIGKILL)
        trial.train_on(2, formations=3)
        trial.change_hosts("localhost:1")
        trial.train_on(1, formations=4)
        assert trial.process.wait(240) == 0, trial.output
        assert trial.formations() == [2, 1, 2, 1], trial.output
        assert "goes on without it: another rank" in trial.output
        assert "formed again (1): 1 ranks" in trial.output
        assert "done: 192 steps of 288, because 3 evaluations in a row were no better" in trial.output
        assert "32 epochs are complete: each of 60 images was taken once" in check_ledger(trial.run)
        points = list(trial.losses())
        # A rank that is gone may have taken its losses of the last step along.
        lost = set(map(int, re.findall(r"formed again \(\d\): .* go on after step (\d+)", trial.output)))
        assert len(lost) == 3
        assert points == [step for step in range(1, 193) if step in points or step not in lost]
    check_board(trial.run.parent, points=points, evaluations=[48, 96, 144, 192], more=set(), ranks=2)
    assert (trial.run / "checkpoints" / "best").resolve().name == "step_00000048"
    best, last = (state(trial.run.parent, name) for name in ("best", "last"))
    statistics = [name for name in best if name.endswith("running_mean")]  # of batch norm, which is frozen
    assert statistics
    assert all(torch.equal(best[name], last[name]) for name in statistics)
    assert "optimizer network.0.0.mlp.fc1.weight/exp_avg" not in last
    assert "optimizer head.weight/exp_avg" not in last
    assert "optimizer aux_head.weight/exp_avg" in last


@pytest.mark.soak
def test_a_rank_that_hangs_is_replaced(images, tmp_path):
    """Only the rank that the others wait for is killed, though Python's lock keeps it from answering."""
    flags = ("--global-batch", "10", "--epochs", "100000", "--hang-timeout", "8")
    faulty = ("--plugin", "tests.faults.injected")
    with on_this_machine(tmp_path, images, HOSTS, *flags, *faulty, INJECTED_FAULT="1:3:lock") as trial:
        trial.train_on(2, formations=3)
        assert trial.formations() == [2, 1, 2]
        assert trial.output.count("so the run goes on without these ranks: rank 1 on ") == 1
        assert "1 of 2 ranks wait for others" in trial.output


@pytest.mark.soak
def test_a_rank_that_hangs_when_another_is_lost_is_replaced(images, tmp_path):
    hosts = f"{HOSTS},{socket.gethostname()}:1"
    flags = ("--global-batch", "10", "--epochs", "100000", "--hang-timeout", "20")
    faulty = ("--plugin", "tests.faults.injected")
    with on_this_machine(tmp_path, images, hosts, *flags, *faulty, INJECTED_FAULT="1::never-leave") as trial:
        trial.train_on(3)
        variables = {host: Path(f"/proc/{process}/environ") for host, process in trial.ranks().items()}
        (other,) = (host for host, file in variables.items() if "HOROVOD_RANK=2" in file.read_text())
        trial.signal_rank(other, signal.SIGKILL)
        trial.train_on(3, formations=2, seconds=180)
        assert trial.output.count("while leaving the ranks of before") == 1


@pytest.mark.soak
def test_many_formations_leave_nothing_behind(images, tmp_path):
    """The memory and the open files of the rank that stays do not grow with the number of formations."""
    measured = []
    with on_this_machine(tmp_path, images, HOSTS, "--global-batch", "10", "--epochs", "100000") as trial:
        trial.train_on(2)
        for number in range(FORMATIONS):
            hosts = HOSTS if number % 2 else "localhost:1"
            trial.change_hosts(hosts)
            trial.train_on(hosts.count(":"), formations=number + 2)
            if number % 2:
                measured.append(used_by(trial.ranks()["localhost"]))
    print("\n".join(f"{mib} MiB, {files} files, {threads} threads" for mib, files, threads in measured))
    half = len(measured) // 2
    earlier, later = (
        [min(used) for used in zip(*part, strict=True)] for part in (measured[:half], measured[half:])
    )
    assert later[0] < earlier[0] + FORMATIONS  # 1 MiB each; a copy of this small model's state has 6
    assert later[1] <= earlier[1]
    assert later[2] <= earlier[2] + THREADS_THAT_COME_AND_GO


def test_a_network_and_its_reducer_are_freed():
    """Ranks that are formed again build both again."""
    network = torch.nn.Linear(2, 2)
    reducer = Reducer(network, World.single(), Exchange(), micro_batches=1)
    network(torch.ones(1, 2)).sum().backward()
    with reducer.synchronized_gradients():
        freed = weakref.ref(network), weakref.ref(network.weight)
    del network, reducer
    gc.collect()
    assert [each() for each in freed] == [None, None]


def used_by(process: int) -> tuple[int, int, int]:
    """Return a process's largest memory since the call before, in MiB, its open files, and its threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    Path(f"/proc/{process}/clear_refs").write_text("5")  # malloc returns 80 MiB for moments: a peak is steady
    files = len(list(Path(f"/proc/{process}/fd").iterdir()))
    return int(status["VmHWM"].split()[0]) // 1024, files, int(status["Threads"])


def test_without_an_elastic_launcher(tmp_path, capsys):
    flags = ["--recipe", "demo", "--elastic", "--global-batch", "10", "--output", str(tmp_path)]
    assert main(["images", *flags]) == 2
    assert "horovodrun --gloo -np N --min-np N" in capsys.readouterr().err


def test_any_number_of_ranks_divides_the_global_batch():
    config = assemble({"elastic": True, "global_batch": 10, "batch_size": 5}, fallback_name="")
    for ranks, batch, accumulation in ((1, 5, 2), (2, 5, 1), (3, 4, 1), (4, 3, 1), (9, 2, 1)):
        resolved = resolve(config, ranks)
        assert (resolved.data.batch_size, resolved.update.accumulation) == (batch, accumulation)
    with pytest.raises(UserError, match="--global-batch 10 leaves a rank of 11 without an image"):
        resolve(config, 11)
    with pytest.raises(UserError, match="--elastic needs --global-batch"):
        resolve(assemble({"elastic": True}, fallback_name=""), 4)
