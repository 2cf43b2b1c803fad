"""Runs Python programs in forks of one process that has imported what ranks import.

    python -m tests.ranks.fork_server SOCKET

The imports of a rank take three seconds of CPU time; here they are done once. A launcher starts
`forked_rank.py` instead of the program. The child takes over the arguments, environment, working directory,
streams and CPUs of that process, and returns its exit status to it. At the fork no other thread may run, and
Horovod and MPI must not be initialized.

A child cannot have other values of variables that are read while the interpreter starts or libraries are
loaded (PYTHON..., OMP_WAIT_POLICY, ...). Tests of start-up, of the binding to CPUs and of a launcher's
environment therefore start plain interpreters.

The server ends with its standard input, and its children with the server.
"""

import contextlib
import ctypes
import gc
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

# One thread, because a fork loses all others; waiting threads sleep, because ranks share few cores.
SERVER_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
PR_SET_PDEATHSIG = 1


def load() -> None:
    """Import what ranks import; raise if that starts a thread, which a fork would lose."""
    import horovod_volo.models.timm_api  # before timm, which imports torchvision

    # isort: split
    import horovod.runner.launch
    import horovod.torch
    import pytest  # noqa: F401  # test modules hold functions that ranks call
    import torch
    import torch._dynamo
    import torch.utils.checkpoint

    import horovod_volo.cluster.entry
    import horovod_volo.engine.run
    import horovod_volo.evaluate  # noqa: F401
    from horovod_volo.data.image_decoder import dali_is_installed

    if dali_is_installed():
        import nvidia.dali.fn  # noqa: F401

    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"the imports started {threads - 1} threads: a fork would lose them")
    if torch.cuda.is_initialized() or horovod.torch.is_initialized():
        raise RuntimeError("the imports initialized CUDA or Horovod: that does not survive a fork")


def serve(address: str) -> list[str]:
    """Fork for each client. Returns only in the processes of programs, with their arguments."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    gc.collect()
    gc.freeze()  # a collection would write to, and thereby copy, the shared pages
    gc.unfreeze = lambda: None
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            shutil.rmtree(Path(address).parent, ignore_errors=True)
            os._exit(0)  # the kernel kills all that was forked
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return attend(client)
        client.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def attend(client: socket.socket) -> list[str]:
    """Fork the program of a client, pass signals on to it, and return its exit status to the client."""
    end_with_parent()
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    # Not buffered, so that no signal after the line is read.
    request = json.loads(client.makefile("rb", buffering=0).readline())
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])  # of the child, too
    child = os.fork()
    if child == 0:
        client.close()
        return become(request, streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    waited_for: list[Any] = [client, ended]
    while ended not in select.select(waited_for, [], [])[0]:
        try:
            numbers = client.recv(64)
        except ConnectionResetError:
            numbers = b""
        if not numbers:  # the client has ended
            waited_for.remove(client)
        for number in numbers or [signal.SIGKILL]:
            os.kill(child, number)  # the child is not waited for yet, so its number is not used again
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become(request: dict[str, Any], streams: list[int]) -> list[str]:
    """Give this process the client's streams, environment, working directory and CPUs."""
    end_with_parent()
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cpus"])
    # Interpreters that do not buffer write each part of a line, too.
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=is_unbuffered or os.isatty(1))
    random.seed()
    import numpy as np
    import torch

    np.random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdecimal() else len(request["cpus"]))
    return request["arguments"]


def run_to_the_end(arguments: list[str]) -> None:
    """Run a program and end like an interpreter, but without freeing the objects of the server."""
    from horovod_volo.cluster.stop_signals import exit_at_once

    try:
        run(arguments)
        status: object = 0
    except SystemExit as exit_request:
        status = 0 if exit_request.code is None else exit_request.code
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    exit_at_once(status & 0xFF)


def run(arguments: list[str]) -> None:
    """Run a program as `python ARGUMENTS` does."""
    if arguments[0] == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)  # so that the program is executed again as __main__
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    load()
    run_to_the_end(serve(sys.argv[1]))
