"""Starts the ranks of a command on this host (`--ranks`): a program by which the command replaces itself.

Horovod's rendezvous server connects the ranks, as under horovodrun. They write to this process's streams, so
that their output is that of one process, and the kernel kills them when it ends.

Invariant: only this process sends stop requests to the ranks, each once. So every rank has a process group of
its own, which the Ctrl-C of a terminal does not reach.
"""

import importlib.util
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from functools import partial

from horovod_volo.cluster.launch_env import OWN, read_launch_env
from horovod_volo.cluster.stop_signals import ENDING, STOP_SIGNALS
from horovod_volo.config.arguments import AUTO
from horovod_volo.core.errors import MISTAKE, UserError, print_error
from horovod_volo.core.processes import die_with_parent

_FAILED = 1
_POLL_SECONDS, _REPEAT_SECONDS = 1.0, 0.05
_GRACE_SECONDS = 600.0  # for ranks that have lost one, and may be writing a checkpoint


def start_ranks(ranks: int, module: str, arguments: Sequence[str]) -> None:
    """Replace this process by the launcher of a command's ranks, unless it is the only one, or one of them.

    Raise UserError if another launcher has started it, or Horovod is not installed.
    """
    launch = read_launch_env()
    if not ranks or launch.launcher == OWN:
        return
    if launch.size > 1:
        raise UserError(
            f"--ranks starts ranks, but {launch.launcher} has started {launch.size} already. Drop --ranks."
        )
    ranks = resolve_ranks(ranks)
    if ranks > 1 and importlib.util.find_spec("horovod") is None:
        from horovod_volo.cluster.collectives import load_horovod

        load_horovod()  # raises the error that says how to build it
    if ranks > 1:
        # A new program has no threads, which could be given the signals that it waits for.
        os.execv(sys.executable, [sys.executable, "-m", __name__, str(ranks), module, *arguments])


def resolve_ranks(ranks: int) -> int:
    """Return the number of ranks: for AUTO one for each GPU, or one, which computes on all cores."""
    from horovod_volo.cluster.pinning import count_gpus

    return max(1, count_gpus()) if ranks == AUTO else ranks


def main(ranks: int, command: Sequence[str]) -> int:
    """Run the ranks to their end; return the exit status of the command."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    passed_on = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # ranks unblock them when they can handle them
    server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)
    slots = get_host_assignments([HostInfo("localhost", ranks)], ranks)
    server.init(slots)
    shared = create_run_env_vars("127.0.0.1", ["lo"], server.server_address[1])
    processes = []
    for slot in slots:
        own = {**shared, **create_slot_env_vars(slot), "HOROVOD_VOLO_RANK": slot.rank}
        rank = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=os.environ | {name: str(value) for name, value in own.items()},
            process_group=0,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        processes.append(rank)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    # After the ranks: a fork of a process with threads could inherit a lock.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return _supervise(processes, passed_on)


def _supervise(ranks: Sequence[subprocess.Popen[bytes]], passed_on: Collection[int]) -> int:
    """Pass stop requests on until all ranks have ended; return the exit status."""
    received, deadly, failed, deadline = set[int](), 0, list[int | None](), math.inf
    while None in (codes := [rank.poll() for rank in ranks]):
        running = [rank for rank in ranks if rank.returncode is None]
        if any(codes) and not failed:
            failed, deadline = codes, time.monotonic() + _GRACE_SECONDS
        if deadly or time.monotonic() > deadline:
            for rank in running:
                os.killpg(rank.pid, signal.SIGKILL)
        found = signal.sigtimedwait([*passed_on, signal.SIGCHLD], _POLL_SECONDS)
        if found is None or found.si_signo == signal.SIGCHLD:
            continue
        number = found.si_signo
        # `timeout` sends its signal twice at once, to the process and to its group.
        while signal.sigtimedwait([number], _REPEAT_SECONDS):
            pass
        if number in received and number in ENDING:
            deadly = number
        received.add(number)
        for rank in running:
            rank.send_signal(number)
    if deadly:  # end by it, as a command of one process does
        signal.signal(deadly, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [deadly])
        os.kill(os.getpid(), deadly)
    for number, code in enumerate(failed or codes):
        if code and code < 0:
            print_error(f"error: rank {number} was ended by {signal.Signals(-code).name}; the others stopped")
    statuses = [rank.wait() for rank in ranks]
    if MISTAKE in statuses:  # ranks that have lost this one have another status
        return MISTAKE
    return _FAILED if min(statuses) < 0 else next(filter(None, statuses), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
