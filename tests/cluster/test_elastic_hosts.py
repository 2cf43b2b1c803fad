"""Elastic runs on emulated hosts: cut off for a moment or for good, killed, stopped, removed and added."""

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from horovod_volo.elastic.ledger import check_ledger
from horovod_volo.engine.checkpoint.files import intact_checkpoints
from tests.cluster.hosts import INTERFACE, SSH_PORT, EmulatedHost, EmulatedNetwork
from tests.faults.elastic_run import SETTINGS, ElasticTrial, started, write_hosts
from tests.ranks.launching import environment

pytestmark = [pytest.mark.needs("ip", "sshd", "ssh", "unshare"), pytest.mark.soak]

GLOO_SECONDS = 6
FOREVER = ("--epochs", "100000", "--eval-every", "100000")
EVENTS = int(os.environ.get("ELASTIC_EVENTS", "20"))


@pytest.fixture(scope="module")
def images(demo_images: Callable[[int, int], Path]) -> Path:
    return demo_images(60, 10)  # 6 steps of 10 images


def job(
    net: EmulatedNetwork, images: Path, folder: Path, hosts: str, *flags: str
) -> contextlib.AbstractContextManager[ElasticTrial]:
    """Start jobs/horovodrun.sh on the first host, with ranks on `hosts`, as answering_hosts.sh finds them."""
    folder.mkdir(exist_ok=True)
    write_hosts(folder / "hosts", hosts)
    command = ("jobs/horovodrun.sh", "demo", *SETTINGS, "--global-batch", "10", *flags)
    often = ("--log-every", "1", "--checkpoint-every", "10")
    variables = environment(
        HOSTS=hosts,
        HOSTS_FILE=str(folder / "hosts"),
        MIN_RANKS="1",
        COOLDOWN="2",
        SSH_PORT=str(SSH_PORT),
        SSH_KEY=str(net.key),
        DATA_DIR=str(images),
        OUTPUT_DIR=str(folder / "runs"),
        NETWORK_INTERFACE=INTERFACE,
        HOROVOD_GLOO_TIMEOUT_SECONDS=str(GLOO_SECONDS),
    )
    del variables["HOROVOD_CYCLE_TIME"]
    return started(folder, net.hosts[0].on_host(*command, *often), variables)


def slots(hosts: list[EmulatedHost]) -> str:
    return ",".join(f"{host.name}:1" for host in hosts)


def end(trial: ElasticTrial, process: int = 0) -> None:
    """Ask it to stop, through a process or a rank, and check what is left of it."""
    os.kill(process or next(iter(trial.ranks().values())), signal.SIGUSR1)
    assert trial.process.wait(60) == 75, trial.output
    assert "each once" in check_ledger(trial.run) or "taken once" in check_ledger(trial.run)
    steps = list(trial.losses())
    assert steps == sorted(steps)
    # The losses of a step whose log point a rank did not live to see are not logged.
    assert steps[-1] - len(steps) < len(trial.formations())
    assert f"stopped at step {steps[-1]} and saved" in trial.output
    assert next(iter(intact_checkpoints(trial.run))).name == f"step_{steps[-1]:08}"
    assert not trial.ranks()


def test_a_partition(net, images, tmp_path):
    """A short one passes unnoticed; after a longer one the launcher's side goes on. Then the run moves."""
    one, two = net.hosts[:2]
    with job(net, images, tmp_path, slots([one, two]), *FOREVER) as trial:
        trial.train_on(2)
        two.unplug()
        time.sleep(GLOO_SECONDS / 3)
        two.plug_in()
        trial.train_on(2)
        assert trial.formations() == [2]
        two.unplug()
        trial.train_on(1)
        cut_off = trial.step()
        written = (trial.run / "log.txt").read_text()
        trial.wait_until(lambda: not two.running("horovod_volo.train"))  # it ends by itself
        assert (trial.run / "log.txt").read_text().startswith(written)
        two.plug_in()
        trial.train_on(2, formations=3)
        assert trial.formations() == [2, 1, 2]
        assert trial.step() > cut_off
        for formation, moved in ((4, net.hosts[1:3]), (5, net.hosts[2:3])):
            trial.change_hosts(slots(moved))
            trial.train_on(len(moved), formations=formation)
        end(trial, min(one.running("jobs/horovodrun.sh")))


def test_a_schedule_of_events(net, images, tmp_path):
    """Hosts are killed, stopped, cut off, removed, and come back; the loss is that of an undisturbed run."""
    chance = random.Random(int(os.environ.get("ELASTIC_SEED", "1")))
    launcher, *others = net.hosts
    taking_part = [launcher, *others[:2]]
    with job(net, images, tmp_path / "disturbed", slots(taking_part), *FOREVER) as trial:
        trial.train_on(len(taking_part))
        for number in range(EVENTS):
            kinds = ["kill", "kill the launcher's", "stop", "cut off"]
            kinds += ["remove"] if len(taking_part) > 2 else ["add"]
            kind, host = chance.choice(kinds), chance.choice(taking_part[1:])
            formations, began = len(trial.formations()), time.monotonic()
            if kind == "kill":
                trial.signal_rank(host.name, signal.SIGKILL)
            elif kind == "kill the launcher's":
                trial.signal_rank(launcher.name, signal.SIGKILL)
            elif kind == "stop":
                trial.signal_rank(host.name, signal.SIGSTOP)
            elif kind == "cut off":
                host.unplug()
                trial.wait_until(lambda before=formations: len(trial.formations()) > before)
                host.plug_in()
            elif kind == "remove":
                taking_part.remove(host)
                trial.change_hosts(slots(taking_part))
            else:
                taking_part.append(next(host for host in others if host not in taking_part))
                trial.change_hosts(slots(taking_part))
            trial.train_on(len(taking_part), formations=formations + 1, seconds=120)
            seconds = time.monotonic() - began
            print(f"{number + 1}. {kind} {host.name}: {len(taking_part)} ranks train after {seconds:.0f} s")
        end(trial)
        disturbed = trial.losses()
        print(check_ledger(trial.run))
    means = []
    for seed in ("42", "43"):
        folder = tmp_path / f"undisturbed_{seed}"
        with job(net, images, folder, slots(net.hosts[:3]), *FOREVER, "--seed", seed) as trial:
            trial.wait_until(lambda trial=trial: trial.step() >= max(disturbed), 600)
            losses = trial.losses()
        means.append(statistics.mean(losses[step] for step in list(disturbed)[-100:] if step in losses))
    own = statistics.mean(list(disturbed.values())[-100:])
    print(f"last 100 of {len(disturbed)} steps: mean loss {own:.3f}; undisturbed {means}")
    assert abs(own - means[0]) < 2 * abs(means[1] - means[0]) + 0.1
