"""An elastic run for tests: its hosts can be changed, and its ranks be found by their hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from horovod_volo.elastic.ledger import LEDGER, read_ledger
from tests.ranks.launching import SCRIPTS, environment, processes, python, wait_until
from tests.runs import ADAMW

GLOO_SECONDS = 5
SETTINGS = ["--img-size", "32", "--batch-size", "4", "--warmup-epochs", "1", "--name", "run"]
SETTINGS += ["--ema-decay", "0.9", "--drop-path", "0.2", *ADAMW]
_HOST = b"HOROVOD_HOSTNAME="


class ElasticTrial:
    """An elastic run, whose output goes to a file."""

    def __init__(self, folder: Path, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start the command, which trains into `folder`/runs/run."""
        self.run = folder / "runs" / "run"
        self._hosts, self._output = folder / "hosts", folder / "output.txt"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=dict(variables), start_new_session=True
            )

    def change_hosts(self, hosts: str) -> None:
        """Let the discovery script name these hosts from now on."""
        write_hosts(self._hosts, hosts)

    def ranks(self) -> dict[str, int]:
        """Return the process on each host, by the name that the discovery script gives to the host."""
        found = {}
        for process, command in processes("horovod_volo.train").items():
            if str(self.run.parent) in command and "python" in command.split()[0]:
                with contextlib.suppress(OSError, StopIteration):  # it has ended, or is none of its ranks
                    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                    name = next(value[len(_HOST) :] for value in variables if value.startswith(_HOST))
                    found[name.decode()] = process
        return found

    def signal_rank(self, host: str, number: signal.Signals) -> None:
        os.kill(self.ranks()[host], number)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def formations(self) -> list[int]:
        """Return the numbers of ranks that have begun to train, one after the other."""
        path = self.run / LEDGER
        return [record["ranks"] for record in read_ledger(path) if "ranks" in record] if path.exists() else []

    def losses(self) -> dict[int, float]:
        """Return the training losses by step, in the order of the file."""
        path = self.run / "metrics.jsonl"
        found = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):  # a line that is being written
                record = json.loads(line)
                if "loss" in record and "lr" in record:
                    found[record["step"]] = record["loss"]
        return found

    def step(self) -> int:
        return max(self.losses(), default=0)

    def wait_until(self, condition: Callable[[], object], seconds: float = 90) -> None:
        """Wait until something is so; fail if the run ends, or after so many seconds."""
        wait_until(condition, seconds, "it", lambda: self.output, 0.1, self.process)

    def train_on(self, ranks: int, *, formations: int = 1, seconds: float = 90) -> None:
        """Wait until so many ranks, formed at least so often, have trained some steps."""

        def formed() -> bool:
            found = self.formations()
            return len(found) >= formations and found[-1] == ranks

        self.wait_until(formed, seconds)
        first = self.step()
        self.wait_until(lambda: self.step() >= first + 3 and formed(), seconds)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in self.ranks().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def started(folder: Path, command: Sequence[str], variables: Mapping[str, str]) -> Iterator[ElasticTrial]:
    """Start an elastic run for the block, and kill what is left of it afterwards."""
    trial = ElasticTrial(folder, command, variables)
    try:
        yield trial
    finally:
        trial.kill()


def on_this_machine(
    folder: Path, images: Path, hosts: str, *flags: str, plain: bool = True, **extra: str
) -> contextlib.AbstractContextManager[ElasticTrial]:
    """Start an elastic run of horovodrun on names of this machine, as localhost:1,127.0.0.1:1."""
    write_hosts(folder / "hosts", hosts)
    script = folder / "discover"
    script.write_text(f"#!/bin/sh\nexec cat {folder / 'hosts'}\n")
    script.chmod(0o755)
    ranks = str(hosts.count(":"))
    launch = (str(SCRIPTS / "horovodrun"), "--gloo", "-np", ranks, "--min-np", "1")
    elastic = ("--host-discovery-script", str(script), "--blacklist-cooldown-range", "1", "2")
    trainer = (*python(plain), "-m", "horovod_volo.train", str(images), "--recipe", "demo", *SETTINGS)
    output = ("--output", str(folder / "runs"), "--log-every", "1", "--elastic")
    variables = environment(
        HOROVOD_GLOO_TIMEOUT_SECONDS=str(GLOO_SECONDS),
        HOROVOD_ELASTIC_TIMEOUT="30",  # a driver that does not answer is named within the limits of a test
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="PASSIVE",
        **extra,
    )
    del variables["HOROVOD_CYCLE_TIME"]
    command = (*launch, *elastic, "--network-interface", "lo", *trainer, *output, *flags)
    return started(folder, command, variables)


def write_hosts(file: Path, hosts: str) -> None:
    """Write the file of hosts that the discovery script reads, at once."""
    new = file.with_suffix(".new")
    new.write_text(hosts.replace(",", "\n"))  # the last line is not ended
    new.replace(file)
