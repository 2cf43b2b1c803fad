"""Training on several emulated hosts gives the same weights as training on one."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import INTERFACE, SSH_PORT, EmulatedNetwork
from tests.ranks.launching import SCRIPTS, launcher, python, run, started, wait_until
from tests.runs import ADAMW, FINISHED, STOPPED, assert_same_state, state

pytestmark = pytest.mark.needs("ip", "sshd", "ssh", "unshare")

GLOBAL_BATCH = 12
SETTINGS = ("--img-size", "32", "--warmup-epochs", "1", "--eval-every", "8", "--name", "run", *ADAMW)
EPOCHS, STEPS = ("--epochs", "8"), 40  # 5 steps per epoch
FEW_EPOCHS, FEW_STEPS = ("--epochs", "2"), 10
OFTEN = ("--log-every", "1", "--checkpoint-every", "1", "--keep-checkpoints", "3")
# Without these flags Open MPI detects a lost connection only after minutes.
SOON = " ".join(f"--mca oob_tcp_keepalive_{name}" for name in ("time 2", "intvl 1", "probes 3"))
PATIENCE_SECONDS = 120
GLOO_SECONDS = 20  # also the time that ranks wait for each other at the start, on a busy machine
ENDED_SECONDS = 2 * GLOO_SECONDS + 18  # and the end of all processes
# The sum of two numbers does not depend on their order, that of four does. With tensors that are not fused,
# which depends on timing, gloo always adds in the same order, on one host or several.
ONE_BY_ONE = {"HOROVOD_FUSION_THRESHOLD": "0"}


@pytest.fixture(scope="module")
def images(demo_images: Callable[[int, int], Path]) -> Path:
    return demo_images(60, 20)


def trainer(images: Path, output: Path, ranks: int, *, plain: bool = False) -> list[str]:
    start = (*python(plain), "-m", "horovod_volo.train", str(images), "--recipe", "demo")
    return [*start, *SETTINGS, "--batch-size", str(GLOBAL_BATCH // ranks), "--output", str(output)]


@pytest.fixture(scope="module")
def alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two ranks on one host."""
    output = tmp_path_factory.mktemp("alone")
    finish([*launcher("gloo", 2), *trainer(images, output, 2), *EPOCHS])
    return output


def finish(command: list[str], **extra: str) -> str:
    """Run a command that must succeed and return its output."""
    done = run(command, seconds=PATIENCE_SECONDS, **extra)
    assert done.returncode == FINISHED, done.stdout
    return done.stdout


def site(net: EmulatedNetwork, images: Path, output: Path) -> dict[str, str]:
    """Return the environment variables of a job on two hosts."""
    return {
        "HOSTS": net.slots(2),
        "SSH_PORT": str(SSH_PORT),
        "SSH_KEY": str(net.key),
        "DATA_DIR": str(images),
        "OUTPUT_DIR": str(output),
        "NETWORK_INTERFACE": INTERFACE,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_SECONDS),
        "MPI_FLAGS": f"--mca pml ob1 --mca btl ^openib {SOON}",
    }


def wait_for_step(process: subprocess.Popen[str], output: Path, step: int) -> None:
    """Wait until a run has saved a checkpoint of this step."""
    saved = output / "run" / "checkpoints"

    def is_saved() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return any(int(folder.name.removeprefix("step_")) >= step for folder in saved.glob("step_????????"))

    wait_until(is_saved, PATIENCE_SECONDS, f"step {step}")


def saved_step(output: Path) -> int:
    metadata = json.loads((output / "run" / "checkpoints" / "last" / "state.json").read_text())
    return int(metadata["step"])


def assert_trained_on(net: EmulatedNetwork, number: int, output: Path) -> None:
    metadata = json.loads((output / "run" / "environment.json").read_text())
    assert metadata["hosts"] == [host.name for host in net.hosts[:number]]


def gradient_bytes(output: Path) -> int:
    return sum(4 * tensor.numel() for name, tensor in state(output).items() if name.startswith("model "))


@pytest.mark.parametrize(
    ("script", "number"), [("horovodrun.sh", signal.SIGUSR1), ("mpirun.sh", signal.SIGTERM)]
)
def test_a_run_that_is_stopped_and_loses_a_host_ends_as_one_on_one_host(
    script, number, net, images, alone, tmp_path
):
    """Bit for bit, after two resumptions, the second of them on one host."""
    job = (f"jobs/{script}", "demo", *SETTINGS, *EPOCHS, *OFTEN, "--batch-size", str(GLOBAL_BATCH // 2))
    reported = site(net, images, tmp_path)
    before = [host.received_bytes() for host in net.hosts]
    login = net.hosts[2]  # a host without ranks
    with started(login.on_host(*job), **reported) as process:
        wait_for_step(process, tmp_path, 2)
        os.kill(min(login.running(f"jobs/{script}")), number)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == STOPPED, output
    assert output.startswith("commit ")
    stopped_at = saved_step(tmp_path)
    assert 2 <= stopped_at < STEPS
    assert f"stopped at step {stopped_at} and saved" in output

    with started(net.hosts[0].on_host(*job), **reported) as process:
        wait_for_step(process, tmp_path, stopped_at + 3)
        net.hosts[1].unplug()
        unplugged = time.monotonic()
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode not in (FINISHED, STOPPED), output
    assert f"at step {stopped_at}:" in output
    left = unplugged + ENDED_SECONDS - time.monotonic()
    wait_until(lambda: not net.running("horovod"), left, "the end of all processes")
    assert_trained_on(net, 2, tmp_path)

    lost_at = saved_step(tmp_path)
    assert stopped_at + 3 <= lost_at < STEPS
    # In each step the two ranks receive each other's gradients; the other hosts receive almost nothing.
    received = [host.received_bytes() - old for host, old in zip(net.hosts, before, strict=True)]
    assert min(received[:2]) > lost_at * gradient_bytes(alone), received
    assert max(received[2:]) < gradient_bytes(alone), received
    output = finish([*launcher("gloo", 2), *trainer(images, tmp_path, 2), *EPOCHS, "--resume", "auto"])
    assert f"at step {lost_at}:" in output
    assert_same_state(alone, tmp_path)


def test_a_run_that_nobody_reads_any_more_stops_and_saves(images, tmp_path):
    """Ctrl-C also ends the `tee` behind horovodrun.sh."""
    job = ["jobs/horovodrun.sh", "demo", *SETTINGS, *EPOCHS, *OFTEN, "--batch-size", "6"]
    places = {"HOSTS": "localhost:2", "DATA_DIR": str(images), "OUTPUT_DIR": str(tmp_path)}
    with started(job, **places) as process:
        wait_for_step(process, tmp_path, 2)
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == STOPPED
    assert saved_step(tmp_path) < STEPS


def test_four_hosts_give_the_weights_of_four_ranks_on_one_host(net, images, tmp_path):
    one, four = tmp_path / "one", tmp_path / "four"
    finish([*launcher("gloo", 4), *trainer(images, one, 4), *FEW_EPOCHS], **ONE_BY_ONE)
    before = [host.received_bytes() for host in net.hosts]
    launch = (str(SCRIPTS / "horovodrun"), "--gloo", "-np", "4", "-H", net.slots(4))
    by_ssh = ("-p", str(SSH_PORT), "-i", str(net.key), "--network-interface", INTERFACE)
    command = (*launch, *by_ssh, *trainer(images, four, 4, plain=True), *FEW_EPOCHS)
    finish(net.hosts[0].on_host(*command), **ONE_BY_ONE)
    assert_trained_on(net, 4, four)
    assert saved_step(four) == FEW_STEPS
    assert_same_state(one, four)
    received = [host.received_bytes() - old for host, old in zip(net.hosts, before, strict=True)]
    assert min(received) > FEW_STEPS * gradient_bytes(one), received
