"""An elastic run for tests: its hosts can be changed, and its ranks be found by their hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from horovod_volo.engine.ledger import LEDGER, read_ledger
from tests.ranks.launching import SCRIPTS, environment, python

GLOO_SECONDS = 5
SETTINGS = (
    *(
        "--recipe",
        "demo",
        "--img-size",
        "32",
        "--batch-size",
        "4",
        "--warmup-epochs",
        "1",
        "--log-every",
        "1",
    ),
    *("--ema-decay", "0.9", "--drop-path", "0.2", "--checkpoint-every", "20", "--name", "run", "--elastic"),
)
_POLL_SECONDS = 0.1
_HOST = b"HOROVOD_HOSTNAME="


class ElasticTrial:
    """An elastic run under horovodrun, whose output goes to a file."""

    def __init__(
        self,
        folder: Path,
        images: Path,
        hosts: str,
        *flags: str,
        least: int = 1,
        on_launcher: Callable[..., list[str]] = lambda *command: list(command),
        horovodrun: Sequence[str] = ("--network-interface", "lo"),
        **extra: str,
    ) -> None:
        """Start it on `hosts`, as localhost:1,127.0.0.1:1; `on_launcher` makes a command run there."""
        folder.mkdir(parents=True, exist_ok=True)
        self.run = folder / "runs" / "run"
        self._hosts, self._output = folder / "hosts", folder / "output.txt"
        self.change_hosts(hosts)
        script = folder / "discover"
        script.write_text(f"#!/bin/sh\nexec cat {self._hosts}\n")
        script.chmod(0o755)
        launch = (str(SCRIPTS / "horovodrun"), "--gloo", "-np", str(hosts.count(":")), "--min-np", str(least))
        elastic = ("--host-discovery-script", str(script), "--blacklist-cooldown-range", "1", "2")
        trainer = (*python(plain=True), "-m", "horovod_volo.train", str(images), *SETTINGS, *flags)
        variables = environment(
            HOROVOD_GLOO_TIMEOUT_SECONDS=str(GLOO_SECONDS),
            OMP_NUM_THREADS="1",
            OMP_WAIT_POLICY="PASSIVE",
            **extra,
        )
        del variables["HOROVOD_CYCLE_TIME"]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                on_launcher(*launch, *elastic, *horovodrun, *trainer, "--output", str(folder / "runs")),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )

    def change_hosts(self, hosts: str) -> None:
        """Let the discovery script name these hosts from now on."""
        new = self._hosts.with_suffix(".new")
        new.write_text(hosts.replace(",", "\n") + "\n")
        new.replace(self._hosts)

    def ranks(self) -> dict[str, int]:
        """Return the process on each host, by the name that the discovery script gives to the host."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                command = (process / "cmdline").read_bytes().split(b"\0")
                if b"horovod_volo.train" not in command or str(self.run.parent).encode() not in command:
                    continue
                variables = (process / "environ").read_bytes().split(b"\0")
                names = [value[len(_HOST) :].decode() for value in variables if value.startswith(_HOST)]
                if b"python" in command[0] and names:
                    found[names[0]] = int(process.name)
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

    def step(self) -> int:
        """Return the last step in the metrics."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        steps = [0]
        for line in lines:
            with contextlib.suppress(ValueError):
                steps.append(json.loads(line)["step"])
        return steps[-1]

    def wait_until(self, condition: Callable[[], object], seconds: float = 90) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it has ended\n{self.output}"
            assert time.monotonic() < limit, f"waited for {seconds} s\n{self.output}"
            time.sleep(_POLL_SECONDS)

    def train_on(self, ranks: int, steps: int = 3) -> None:
        """Wait until so many ranks have trained so many steps."""
        self.wait_until(lambda: self.formations()[-1:] == [ranks])
        first = self.step()
        self.wait_until(lambda: self.step() >= first + steps and self.formations()[-1:] == [ranks])

    def end(self, seconds: float = 120) -> int:
        """Wait until it ends; return the status."""
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Kill what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in self.ranks().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def elastic_run(*arguments: object, **options: object) -> Iterator[ElasticTrial]:
    """Start an elastic run for the block, and kill what is left of it afterwards."""
    trial = ElasticTrial(*arguments, **options)  # type: ignore[arg-type]
    try:
        yield trial
    finally:
        trial.kill()
