"""Seeded schedules of faults, and small runs that meet them: each ends in a history for the judge."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.counting_rank import SAMPLES, STALE_SECONDS, process_state
from tests.faults.judge import DONE, History, RunPlan, parsed, read_history
from tests.ranks.forking import fork

EPOCHS, GLOBAL_BATCH, HOSTS = 8, 8, ("a", "b", "c", "d")
PLAN = RunPlan(seed=42, images=SAMPLES, global_batch=GLOBAL_BATCH, steps=EPOCHS * SAMPLES // GLOBAL_BATCH)
SETTINGS = f"""
--plugin tests.faults.counting_rank --model volo_demo --img-size 32 --seed {PLAN.seed} --epochs {EPOCHS}
--warmup-epochs 1 --cooldown-epochs 0 --lr 0.5 --opt sgd --ema-decay 0.9 --compression none --batch-size 4
--global-batch {GLOBAL_BATCH} --log-every 1 --checkpoint-every 2 --keep-checkpoints 3 --eval-every 2
--device cpu --name run --binding none --image-decoder pillow --resume auto
""".split()
_STARTS, _SECONDS = 12, 90.0
# What may happen to a start, some of it twice as often.
KINDS = "kill, kill, kill, kill launcher, stop, pause, pause for long, cut off, cut off for long"
KINDS += ", second launcher, slow disk, full disk, clock, other hosts, other hosts, damage, take over"


class Fault(NamedTuple):
    """Something that happens after so many seconds of training."""

    kind: str
    after: float = 0.2
    chance: float = 0.0  # from 0 to 1, for what it leaves open


class Schedule(NamedTuple):
    """A run and what happens to each of its starts; afterwards it is started until it is done."""

    ranks: int
    elastic: bool
    starts: list[list[Fault]]


def draw(seed: int) -> Schedule:
    """Draw a schedule."""
    chance = random.Random(seed)

    def fault() -> Fault:
        return Fault(chance.choice(KINDS.split(", ")), chance.uniform(0.0, 0.8), chance.random())

    starts = [[fault() for _ in range(chance.randint(1, 3))] for _ in range(chance.randint(1, 2))]
    starts = [sorted(faults, key=lambda each: each.after) for faults in starts]
    return Schedule(chance.choice((1, 2, 2, 4)), chance.random() < 0.6, starts)


class SmallRun:
    """A run in a folder, with all that was started for it."""

    def __init__(self, folder: Path, schedule: Schedule) -> None:
        self.folder, self.runs, self.schedule = folder, folder / "runs", schedule
        self.runs.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(self.runs)]  # a disk that can be full
        self.is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
        self.launchers: list[subprocess.Popen[bytes]] = []

    def launch(self, machine: str = "here") -> subprocess.Popen[bytes]:
        """Start the launcher, on some machine as far as the lock knows."""
        hosts, elastic = ",".join(HOSTS[: self.schedule.ranks]), ["--elastic"] * self.schedule.elastic
        flags = ["numbers", *SETTINGS, "--output", str(self.runs), *elastic]
        command = [*fork(), "-m", "tests.faults.counting_launcher", str(self.folder), hosts, *flags]
        variables = {"MACHINE": machine, "OMP_NUM_THREADS": "1", "HOROVOD_START_TIMEOUT": "2"}
        with (self.folder / f"output.{len(self.launchers):02}").open("wb") as output:
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": output, "stderr": output}
            launcher = subprocess.Popen(command, env=os.environ | variables, **streams)
        self.launchers.append(launcher)
        return launcher

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return the events of a kind so far."""
        return [each for each in parsed(self.folder / "history.jsonl") if each["event"] == event]

    def ranks(self) -> list[int]:
        """Return the processes of the newest ranks that are left, rank 0 first."""
        begun = self.events("started")
        newest = [each for each in begun if each["set"] == begun[-1]["set"]]
        processes = [each["process"] for each in sorted(newest, key=lambda each: each["rank"])]
        return [process for process in processes if process_state(process) != "Z"]

    def play(self) -> None:
        """Start the run as often as the schedule has starts, and then until it is done."""
        for number in range(_STARTS):
            if number >= len(self.schedule.starts):
                self.wait()
            begun, launcher = len(self.events("started")), self.launch()
            faults = self.schedule.starts[number] if number < len(self.schedule.starts) else []
            limit = time.monotonic() + _SECONDS
            while faults and len(self.events("started")) == begun and launcher.poll() is None:
                assert time.monotonic() < limit, f"it does not begin\n{self.output()}"
                time.sleep(0.02)
            began = time.monotonic()
            for fault in faults:
                time.sleep(max(0.0, began + fault.after - time.monotonic()))
                with contextlib.suppress(ProcessLookupError, BrokenPipeError, IndexError):
                    self.happen(fault, launcher)
            try:
                status = launcher.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"it does not end\n{self.output()}") from None
            if status == DONE and number >= len(self.schedule.starts) - 1:
                return
        raise AssertionError(f"it is not done after {_STARTS} starts\n{self.output()}")

    def happen(self, fault: Fault, launcher: subprocess.Popen[bytes]) -> None:
        """Let a fault happen."""
        chance, ranks = random.Random(fault.chance), self.ranks()
        one, host = chance.choice([ranks[0], ranks[-1]]), chance.choice(HOSTS[: self.schedule.ranks])
        kind = fault.kind
        if kind in ("kill", "stop"):
            number = signal.SIGKILL if kind == "kill" else chance.choice([signal.SIGTERM, signal.SIGUSR1])
            os.kill(one, number)
        elif kind in ("pause", "pause for long", "take over"):
            if kind == "take over":  # it is more often stopped while it writes
                (self.folder / "slow").touch()
                time.sleep(chance.uniform(0.1, 0.3))
            os.kill(one, signal.SIGSTOP)
            time.sleep(0.3 if kind == "pause" else 2 * STALE_SECONDS)
            if kind == "take over":
                self.launch("elsewhere")
                time.sleep(2 * STALE_SECONDS)
            os.kill(one, signal.SIGCONT)
        elif kind in ("cut off", "cut off for long"):
            tell(launcher, f"cut {host} {0.4 if kind == 'cut off' else 2.5}")
        elif kind == "other hosts":
            tell(launcher, f"hosts {','.join(chance.sample(HOSTS, chance.randint(1, 4)))}")
        elif kind == "second launcher":
            self.launch(chance.choice(["here", "elsewhere"]))
        elif kind == "clock":
            (self.folder / "clock").write_text(str(chance.uniform(-1e7, 1e7)))
        elif kind == "slow disk":
            (self.folder / "slow").touch()
        elif kind == "full disk" and self.is_mounted:
            with contextlib.suppress(OSError), (self.runs / "ballast").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            time.sleep(chance.uniform(0.1, 1.0))
            (self.runs / "ballast").unlink()
        elif kind in ("kill launcher", "damage"):
            launcher.kill()
            if kind == "damage" and launcher.wait() != DONE:
                self.wait()  # until nobody reads checkpoints
                for newest in sorted(self.runs.glob("run/checkpoints/step_*/model.safetensors"))[1:][-1:]:
                    newest.write_bytes(newest.read_bytes()[:-1] + b"?")

    def output(self) -> str:
        """Return what all starts have printed."""
        return "\n".join(file.read_text(errors="replace") for file in sorted(self.folder.glob("output.*")))

    def left(self) -> list[int]:
        """Return the processes of ranks that have not ended."""
        return [each["of"] for each in self.events("forked") if process_state(each["of"]) != "Z"]

    def wait(self) -> None:
        """Wait until all processes have ended by themselves."""
        limit = time.monotonic() + _SECONDS
        while self.left() or any(launcher.poll() is None for launcher in self.launchers):
            assert time.monotonic() < limit, f"processes {self.left()} do not end\n{self.output()}"
            time.sleep(0.02)

    def close(self) -> None:
        """Kill what is left."""
        for launcher in self.launchers:
            launcher.kill()
            launcher.communicate()
        for process in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.runs)], check=True)


def run(folder: Path, schedule: Schedule, states: Sequence[str] = ()) -> History:
    """Let a small run meet the faults of a schedule; return its history."""
    folder.mkdir(parents=True)
    small = SmallRun(folder, schedule)
    try:
        small.play()
        small.wait()
        return read_history(folder, PLAN, states)
    finally:
        small.close()


def undisturbed(folder: Path) -> list[str]:
    """Return hashes of the state after each step of a run without faults, on one rank."""
    events = run(folder, Schedule(1, False, [])).events
    by_step = {each["step"]: each["state"] for each in events if each["event"] in ("started", "step")}
    return [by_step[step] for step in range(PLAN.steps + 1)]


def tell(launcher: subprocess.Popen[bytes], command: str) -> None:
    assert launcher.stdin is not None
    launcher.stdin.write(f"{command}\n".encode())
    launcher.stdin.flush()
