"""Collects the findings of all ranks, and compares their versions, code, settings, folders and sums.

A separate thread calls Horovod. The main thread keeps a time limit and receives SIGTERM, which the launcher
sends when another rank has failed; a thread that waits inside Horovod can do neither.
"""

import os
import platform
import re
import secrets
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.collectives import RankLostError
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.topology import cpu_ranges
from horovod_volo.cluster.world import World, rank_resources
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.environment import PACKAGE, code_hashes, package_versions
from horovod_volo.core.errors import UserError
from horovod_volo.doctor.host import interface_speeds
from horovod_volo.doctor.report import Check, Finding, failure, from_error, ok, warning

# If ranks differ in one of these, they wait for each other forever or compute wrong sums. The names are
# listed because other variables of these libraries contain host addresses, which differ, and secrets.
_SETTINGS = re.compile(
    "HOROVOD_(AUTOTUNE|BATCH_D2D_MEMCOPIES|CACHE_CAPACITY|CONTROLLER|CPU_OPERATIONS|DISABLE_GROUP_FUSION"
    "|FUSION_THRESHOLD|HIERARCHICAL_(ALLREDUCE|ALLGATHER)|NUM_NCCL_STREAMS|TORUS_ALLREDUCE)"
    "|NCCL_(ALGO|IB_DISABLE|NET|P2P_DISABLE|PROTO|SHM_DISABLE)"
)
_DIFFERENCES_SHOWN = 3

_VISIBLE_SECONDS, _POLL_SECONDS = 3.0, 0.05  # network file systems show the files of other hosts with a delay

_LARGE_BYTES = 16 * 2**20
_SMALL_REPEATS, _LARGE_REPEATS = 30, 4
# Limits that only a defect exceeds; a good network is far from them.
_MIN_FRACTION_OF_LINE = 0.05
_MIN_BYTES_PER_SECOND = 50e6  # if the speed of the interface is unknown: less than half a gigabit
_MAX_SECONDS, _MAX_CYCLES = 0.02, 10  # of the latency, which has a part in Horovod's cycles
_COLLECTING_SECONDS = 120.0
_incomplete = partial(failure, remedy="See what the other ranks and the launcher print.", subject="ranks")


def list_checks(world: World, folder: Path) -> dict[str, Check]:
    """Return the checks by subject. Each is collective: every rank calls it."""
    checks: dict[str, Check] = {"shared folder": partial(check_shared_folder, world, folder)}
    if world.size > 1:
        versions = {"python": platform.python_version(), **package_versions()}
        code = {name: digest[:8] for name, digest in code_hashes(PACKAGE).items()}
        settings = {name: value for name, value in os.environ.items() if _SETTINGS.fullmatch(name)}
        for subject, values, remedy in (
            ("versions", versions, "Run ./tools/setup on every host, or share one .venv."),
            ("code", code, "Check out the same commit on every host, or run from one shared folder."),
            ("settings", settings, "Set it before horovodrun, or use mpirun -x NAME."),
        ):
            checks[subject] = partial(_compare_with_rank_zero, world, values, remedy)
        checks["ring"] = partial(_check_allreduce, world)
    return checks


def _compare_with_rank_zero(world: World, values: dict[str, str], remedy: str) -> list[Finding]:
    return [compare(values, world.broadcast_object(values), remedy)]


def compare(mine: Mapping[str, str], rank_zero: Mapping[str, str], remedy: str) -> Finding:
    """Report the names whose values differ from rank 0's."""
    different = [
        f"{name} is {mine.get(name, 'missing')}, on rank 0 {rank_zero.get(name, 'missing')}"
        for name in sorted({*mine, *rank_zero})
        if mine.get(name) != rank_zero.get(name)
    ]
    if not different:
        return ok(f"the same on all ranks ({len(mine)} compared)")
    if len(different) > _DIFFERENCES_SHOWN:
        different[_DIFFERENCES_SHOWN:] = [f"and {len(different) - _DIFFERENCES_SHOWN} more"]
    return failure("; ".join(different), remedy)


def check_shared_folder(world: World, folder: Path) -> Iterator[Finding]:
    """Write a file on every rank, and wait until it sees those of all ranks. Collective.

    Where the folder is missing, its nearest parent is checked, in which a run would create it.
    """
    token = world.broadcast_object(secrets.token_hex(8))
    names = [f".doctor-{token}-{rank}" for rank in range(world.size)]
    problem, existing = "", folder
    try:
        try:
            existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            with atomic_write(existing / names[world.rank]):
                pass
        except OSError as error:
            problem = error.strerror or str(error)
        by_rank = world.allgather_object((problem, socket.gethostname()))
        invisible = [rank for rank, (other, _) in enumerate(by_rank) if not other]
        start = time.monotonic()
        while invisible and time.monotonic() < start + _VISIBLE_SECONDS:
            invisible = [rank for rank in invisible if not (existing / names[rank]).exists()]
            time.sleep(_POLL_SECONDS if invisible else 0)
        world.allgather_object(None)  # every rank has looked
    finally:
        with suppress(OSError):
            (existing / names[world.rank]).unlink()
    name_another = "--shared here, --output for training."
    if problem:
        remedy = f"Mount it for writing, give this user permission (see `ls -ld {existing}`), or name another"
        yield failure(f"{folder}: cannot write there: {problem}", f"{remedy}: {name_another}")
    elif invisible:
        hosts = ", ".join(dict.fromkeys(by_rank[rank][1] for rank in invisible))
        text = f"{folder}: is not shared: ranks {cpu_ranges(invisible)} (on {hosts}) write to another folder"
        remedy = "Name a folder that every host mounts from the same file server"
        yield failure(text, f"{remedy}: {name_another}")
    else:
        yield ok(f"{folder}: every rank can write there, and sees the others' files")


def _check_allreduce(world: World) -> Iterator[Finding]:
    device = rank_resources(world).device  # that training uses
    small, large = torch.ones(1, device=device), torch.ones(_LARGE_BYTES // 4, device=device)
    _timed_average(world, small)  # Horovod negotiates a tensor at length only the first time
    latency = statistics.median(_timed_average(world, small) for _ in range(_SMALL_REPEATS))
    _timed_average(world, large)
    best = min(_timed_average(world, large) for _ in range(_LARGE_REPEATS))
    # A ring sends 2 (n - 1) / n of the data over each link.
    bandwidth = 2 * (world.size - 1) / world.size * _LARGE_BYTES / best
    is_correct = all(torch.allclose(tensor, torch.ones_like(tensor), rtol=1e-3) for tensor in (small, large))
    fastest = max(interface_speeds().values(), default=0)
    slowest = min(world.allgather_object(fastest)) if len(set(world.hosts())) > 1 else 0
    found = assess_allreduce(latency, bandwidth, is_correct, slowest, "GPUs" if small.is_cuda else "CPUs")
    # All ranks report rank 0's measurement, so that the report has one line for it.
    yield from world.broadcast_object(list(found))


def _timed_average(world: World, tensor: torch.Tensor) -> float:
    start = time.perf_counter()
    world.collectives.allreduce_async(tensor, f"links.{tensor.numel()}", 1.0 / world.size)()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start


def assess_allreduce(
    latency: float, bandwidth: float, is_correct: bool, line_megabits: int, devices: str
) -> Iterator[Finding]:
    """Compare bandwidth with the slowest host's fastest interface, and latency with Horovod's cycle time."""
    if not is_correct:
        remedy = "Run with NCCL_DEBUG=WARN; use the same Horovod, NCCL and driver on every rank."
        yield failure("averages over all ranks are wrong", remedy)
        return
    measured = f"between {devices}: {latency * 1e3:.1f} ms for 4 bytes, {bandwidth / 1e6:.0f} MB/s for 16 MiB"
    least = _MIN_FRACTION_OF_LINE * line_megabits * 1e6 / 8 or _MIN_BYTES_PER_SECOND
    longest = _MAX_SECONDS + _MAX_CYCLES * float(os.environ.get("HOROVOD_CYCLE_TIME", "1")) / 1000
    if bandwidth < least:
        remedy = "Name the fast interface: horovodrun --network-interface NAME, or mpirun --mca "
        remedy += "btl_tcp_if_include NAME. Check that no other jobs run on these hosts."
        yield warning(f"{measured}: at least {least / 1e6:.0f} MB/s were expected", remedy)
    if latency > longest:
        remedy = "Look for other processes on the hosts' cores, and for idle ranks (HOROVOD_LOG_LEVEL=debug)."
        yield warning(f"{measured}: at most {longest * 1e3:.0f} ms were expected", remedy)
    if bandwidth >= least and latency <= longest:
        yield ok(measured)


@dataclass
class CollectedFindings:
    """The findings of all ranks so far; the collecting thread adds to it."""

    by_rank: list[list[Finding]] = field(default_factory=list)  # empty: not connected
    hosts: list[str] = field(default_factory=list)  # by rank
    world: World | None = None
    problem: Finding | None = None  # why the findings are incomplete


class _TerminatedError(Exception):
    """The launcher sent SIGTERM."""


def collect_findings(own: list[Finding], binding: Binding, folder: Path) -> CollectedFindings:
    """Connect all ranks, gather their `own` findings and run the checks between ranks. Collective."""
    collected = CollectedFindings()
    thread = threading.Thread(target=_collect, args=(collected, own, binding, folder), daemon=True)
    by_launcher = read_launch_env().size > 1  # otherwise SIGTERM ends the doctor
    if by_launcher:
        signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        thread.start()
        thread.join(_COLLECTING_SECONDS)
        if thread.is_alive():
            what = "finish the checks" if collected.world else "connect"
            collected.problem = _incomplete(f"did not {what} within {_COLLECTING_SECONDS:.0f} s")
    except _TerminatedError:
        text = "the launcher ended this rank while it waited for the others: one of them has failed"
        collected.problem = _incomplete(text)
    finally:
        if by_launcher:
            # Print the report first; the launcher can still send SIGKILL.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return collected


def _collect(collected: CollectedFindings, own: list[Finding], binding: Binding, folder: Path) -> None:
    """Store findings in `collected` as they arrive. Collective: every rank calls this."""
    try:
        collected.world = world = World.connect(binding)
        collected.hosts = world.hosts()
        collected.by_rank = world.allgather_object(own)
        for subject, check in list_checks(world, folder).items():
            try:
                found = [replace(each, subject=subject) for each in check()]
            except UserError as error:  # raised on all ranks
                found = [replace(from_error(error), subject=subject)]
            for findings, more in zip(collected.by_rank, world.allgather_object(found), strict=True):
                findings += more
    except UserError as error:
        collected.problem = replace(from_error(error), subject="ranks")
    except RankLostError:
        collected.problem = _incomplete("one of them exited during the checks")
    except Exception as error:  # Horovod raises many types when ranks cannot connect
        collected.problem = _incomplete(f"cannot connect: {type(error).__name__}: {error}")


def _on_sigterm(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise _TerminatedError
