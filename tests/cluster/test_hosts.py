"""Training on several emulated hosts gives the same weights as training on one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from horovod_volo.demo.demo_set import make_demo_set
from tests.cluster.hosts import INTERFACE, SSH_PORT, EmulatedNetwork, network
from tests.ranks.launching import SCRIPTS, environment, launcher, python, run

pytestmark = pytest.mark.needs("ip", "sshd", "ssh", "unshare")

GLOBAL_BATCH = 12
IMAGES = 60  # 5 steps per epoch
SETTINGS = ("--img-size", "32", "--warmup-epochs", "1", "--eval-every", "8", "--name", "run")
EPOCHS, STEPS = ("--epochs", "8"), 40
FEW_EPOCHS, FEW_STEPS = ("--epochs", "2"), 10
OFTEN = ("--log-every", "1", "--checkpoint-every", "1", "--keep-checkpoints", "3")
# Without these flags Open MPI detects a lost connection only after minutes.
SOON = " ".join(f"-mca oob_tcp_keepalive_{name}" for name in ("time 2", "intvl 1", "probes 3"))
PATIENCE_SECONDS = 120
GLOO_SECONDS = 20  # also the time that ranks wait for each other at the start, on a busy machine
ENDED_SECONDS = 2 * GLOO_SECONDS + 18  # and the end of all processes
# The sum of two numbers does not depend on their order, that of four does. With tensors that are not fused,
# which depends on timing, each library always adds in the same order, on one host or several.
ONE_BY_ONE = {"HOROVOD_FUSION_THRESHOLD": "0"}
FP32_OF_FOUR = 1e-5


@pytest.fixture(scope="module")
def hosts() -> Iterator[EmulatedNetwork]:
    with network(4) as made:
        yield made


@pytest.fixture
def net(hosts: EmulatedNetwork) -> Iterator[EmulatedNetwork]:
    """Return the hosts for one test; restore their links and end their processes afterwards."""
    yield hosts
    for host in hosts.hosts:
        host.plug_in()
        for process in host.running("horovod"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=IMAGES, val=20)
    return folder


@pytest.fixture(scope="module")
def alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two ranks on one host."""
    output = tmp_path_factory.mktemp("alone")
    finish([*launcher("gloo", 2), *trainer(images, output, 2, plain=False), *EPOCHS])
    return output


@pytest.fixture(scope="module")
def four_alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train four ranks on one host, for a few epochs."""
    output = tmp_path_factory.mktemp("four_alone")
    finish([*launcher("gloo", 4), *trainer(images, output, 4, plain=False), *FEW_EPOCHS], **ONE_BY_ONE)
    return output


def trainer(images: Path, output: Path, ranks: int, *, plain: bool = True) -> list[str]:
    start = (*python(plain), "-m", "horovod_volo.train", str(images), "--recipe", "demo")
    return [*start, *SETTINGS, "--batch-size", str(GLOBAL_BATCH // ranks), "--output", str(output)]


def job(script: str) -> tuple[str, ...]:
    return (f"jobs/{script}", "demo", *SETTINGS, *EPOCHS, *OFTEN, "--batch-size", str(GLOBAL_BATCH // 2))


def finish(command: list[str], **extra: str) -> str:
    """Run a command that must succeed and return its output."""
    done = run(command, seconds=PATIENCE_SECONDS, **extra)
    assert done.returncode == 0, done.stdout
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
        "MPI_FLAGS": f"-mca pml ob1 -mca btl ^openib {SOON}",
    }


@contextlib.contextmanager
def started(command: list[str], **extra: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**extra),
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for_step(process: subprocess.Popen[str], output: Path, step: int) -> None:
    """Wait until a run has saved a checkpoint of this step."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    saved = output / "run" / "checkpoints"
    while not any(int(folder.name.removeprefix("step_")) >= step for folder in saved.glob("step_????????")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "training did not begin"
        time.sleep(0.02)


def saved_step(output: Path) -> int:
    state = json.loads((output / "run" / "checkpoints" / "last" / "state.json").read_text())
    return int(state["step"])


def weights(output: Path) -> dict[str, torch.Tensor]:
    folder = output / "run" / "checkpoints" / "last"
    files = {file.stem: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
    assert "model" in files
    return {f"{file}: {name}": tensor for file, tensors in files.items() for name, tensor in tensors.items()}


def assert_same_bits(output: Path, expected: Path) -> None:
    found, uninterrupted = weights(output), weights(expected)
    assert found.keys() == uninterrupted.keys()
    assert [name for name, tensor in uninterrupted.items() if not torch.equal(found[name], tensor)] == []


def assert_trained_on(net: EmulatedNetwork, number: int, output: Path) -> None:
    metadata = json.loads((output / "run" / "environment.json").read_text())
    assert metadata["hosts"] == [host.name for host in net.hosts[:number]]


def gradient_bytes(output: Path) -> int:
    return sum(4 * tensor.numel() for name, tensor in weights(output).items() if name.startswith("model:"))


@pytest.mark.parametrize(
    ("script", "number"), [("horovodrun.sh", signal.SIGUSR1), ("mpirun.sh", signal.SIGTERM)]
)
def test_a_stopped_and_resumed_run_on_two_hosts_is_bit_identical_to_one_host(
    script: str, number: int, net: EmulatedNetwork, images: Path, alone: Path, tmp_path: Path
) -> None:
    reported = site(net, images, tmp_path)
    before = [host.received_bytes() for host in net.hosts]
    login = net.hosts[2]  # a host without ranks
    with started(login.on_host(*job(script)), **reported) as process:
        wait_for_step(process, tmp_path, 2)
        os.kill(min(login.running(f"jobs/{script}")), number)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, output
    step = saved_step(tmp_path)
    assert 2 <= step < STEPS
    assert f"stopped at step {step} and saved" in output

    output = finish(net.hosts[0].on_host(*job(script)), **reported)
    assert output.startswith("commit ")
    assert f"at step {step}:" in output
    assert saved_step(tmp_path) == STEPS
    assert_trained_on(net, 2, tmp_path)
    assert_same_bits(tmp_path, alone)
    # In each step the two ranks receive each other's gradients; the other hosts receive almost nothing.
    received = [host.received_bytes() - old for host, old in zip(net.hosts, before, strict=True)]
    assert min(received[:2]) > STEPS * gradient_bytes(alone), received
    assert max(received[2:]) < gradient_bytes(alone), received
    assert net.running("horovod") == []


@pytest.mark.parametrize("library", ["gloo", "mpi"])
def test_four_hosts_give_the_weights_of_four_ranks_on_one_host(
    library: str, net: EmulatedNetwork, images: Path, four_alone: Path, tmp_path: Path
) -> None:
    before = [host.received_bytes() for host in net.hosts]
    launch = (str(SCRIPTS / "horovodrun"), f"--{library}", "-np", "4", "-H", net.slots(4))
    by_ssh = ("-p", str(SSH_PORT), "-i", str(net.key), "--network-interface", INTERFACE)
    command = net.hosts[0].on_host(*launch, *by_ssh, *trainer(images, tmp_path, 4), *FEW_EPOCHS)
    finish(command, **ONE_BY_ONE)
    assert_trained_on(net, 4, tmp_path)
    assert saved_step(tmp_path) == FEW_STEPS
    if library == "gloo":
        assert_same_bits(tmp_path, four_alone)
    expected, found = weights(four_alone), weights(tmp_path)
    for name, tensor in expected.items():
        if name.startswith("model:"):
            assert (found[name] - tensor).abs().max() <= FP32_OF_FOUR, name
    received = [host.received_bytes() - old for host, old in zip(net.hosts, before, strict=True)]
    assert min(received) > FEW_STEPS * gradient_bytes(four_alone), received


@pytest.mark.parametrize("script", ["horovodrun.sh", "mpirun.sh"])
def test_a_run_that_loses_a_host_ends_and_can_be_resumed(
    script: str, net: EmulatedNetwork, images: Path, alone: Path, tmp_path: Path
) -> None:
    reported = site(net, images, tmp_path)
    with started(net.hosts[0].on_host(*job(script)), **reported) as process:
        wait_for_step(process, tmp_path, 3)
        net.hosts[1].unplug()
        unplugged = time.monotonic()
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode not in (0, 75), output
    while net.running("horovod"):
        assert time.monotonic() < unplugged + ENDED_SECONDS, net.running("horovod")
        time.sleep(0.1)
    assert time.monotonic() < unplugged + ENDED_SECONDS

    net.hosts[1].plug_in()
    step = saved_step(tmp_path)
    assert 3 <= step < STEPS
    assert f"at step {step}:" in finish(net.hosts[0].on_host(*job(script)), **reported)
    assert_same_bits(tmp_path, alone)
