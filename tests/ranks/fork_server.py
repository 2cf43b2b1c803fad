"""Runs Python programs in forks of one process that has imported what ranks import.

    python -m tests.ranks.fork_server SOCKET

A rank spends three seconds of CPU time on imports before its first line. Here they are paid once. The
programs are started by `forked_rank.py`, which stands where a launcher wants its program; a child takes
over that process's arguments, environment, folder, streams and CPUs, and its exit status goes back.
Nothing a child needs may have begun before the fork: no thread runs, Horovod and MPI are not initialized.

What differs from an interpreter of its own: variables that libraries read while they are loaded cannot
change (the request is refused), and all children have one hash seed. Tests of start-up, of the binding
to CPUs and of a launcher's environment therefore start plain interpreters.

The server ends when its standard input does, and its children with it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

# Read while the interpreter starts or a library is loaded.
READ_ON_LOADING = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("TORCH", "PYTORCH", "DALI_", "TRITON_", "CUDA_", "TF_", "LC_", "LANG"),
    *("HF_", "HUGGINGFACE_", "TIMM_", "XDG_", "HOME"),
)
# Of these names, what is read later, or done by a child itself.
READ_LATER = ("TORCHINDUCTOR_", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUNBUFFERED")
# One thread, so that none is lost at a fork; waiting threads sleep, as ranks share few cores.
OF_THE_SERVER = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
PR_SET_PDEATHSIG = 1


def load() -> None:
    """Import what ranks import; raise where that starts a thread, which a fork would lose."""
    import horovod_volo.models.timm_api  # first: timm cannot be imported everywhere

    # isort: split
    import horovod.runner.launch
    import horovod.torch
    import torch
    import torch._dynamo
    import torch.utils.checkpoint

    import horovod_volo.cluster.entry
    import horovod_volo.engine.run
    import horovod_volo.evaluate  # noqa: F401

    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"the imports started {threads - 1} threads: a fork would lose them")
    if torch.cuda.is_initialized() or horovod.torch.is_initialized():
        raise RuntimeError("the imports initialized CUDA or Horovod: that does not survive a fork")


def loaded_with(environment: dict[str, str]) -> dict[str, str]:
    """Return what a process cannot change any more, once it runs."""
    return {
        name: text
        for name, text in environment.items()
        if name.startswith(READ_ON_LOADING) and not name.startswith(READ_LATER)
    }


def receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read a request and the three streams that come with it."""
    streams = array.array("i")
    data, others, _, _ = client.recvmsg(65536, socket.CMSG_SPACE(3 * streams.itemsize))
    for level, kind, content in others:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            streams.frombytes(content)
    size, _, rest = data.partition(b"\n")
    while len(rest) < int(size):
        more = client.recv(65536)
        if not more:
            raise ConnectionError("a request ended early")
        rest += more
    return json.loads(rest), streams.tolist()


def serve(address: str) -> list[str]:
    """Fork a child for each request. Returns in each child alone: the words that it is to run."""
    started_with = loaded_with(dict(os.environ))
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    waiting.register(sys.stdin, selectors.EVENT_READ)
    clients: dict[socket.socket, int] = {}  # its child
    children: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that tells of its end
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, pages that children share
    print("ready", flush=True)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is sys.stdin:
                shutil.rmtree(Path(address).parent, ignore_errors=True)
                os._exit(0)  # children are killed by the kernel
            if key.fileobj is listening:
                client, _ = listening.accept()
                request, streams = receive(client)
                child = os.fork() if _is_possible(client, request, started_with) else -1
                if child == 0:
                    waiting.close()
                    for other in (listening, client, *clients):
                        other.close()
                    for descriptor in children:
                        os.close(descriptor)
                    return _become(request, streams)
                for stream in streams:
                    os.close(stream)
                if child < 0:
                    client.close()
                    continue
                ended = os.pidfd_open(child)
                clients[client], children[ended] = child, (child, client)
                waiting.register(client, selectors.EVENT_READ)
                waiting.register(ended, selectors.EVENT_READ)
            elif key.fileobj in clients:
                _pass_on(key.fileobj, clients, waiting)
            elif key.fileobj in children:
                child, client = children.pop(key.fileobj)
                waiting.unregister(key.fileobj)
                os.close(key.fileobj)
                _, status = os.waitpid(child, 0)
                if clients.pop(client, None) is not None:
                    waiting.unregister(client)
                    with contextlib.suppress(BrokenPipeError):
                        client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                client.close()


def _is_possible(client: socket.socket, request: dict[str, Any], started_with: dict[str, str]) -> bool:
    """Say whether a child can run this; else tell the client why not."""
    wanted = loaded_with(request["environment"])
    # What the server alone was given, the trainer sets for itself.
    started_with = {name: text for name, text in started_with.items() if name not in OF_THE_SERVER} | {
        name: text for name, text in OF_THE_SERVER.items() if name in wanted
    }
    names = {name for name, _ in wanted.items() ^ started_with.items()}
    if names:
        client.sendall(
            f"refused: {', '.join(sorted(names))} cannot change in a fork of a process that has loaded "
            "PyTorch. Start this program in an interpreter of its own.\n".encode()
        )
    return not names


def _pass_on(
    client: socket.socket, clients: dict[socket.socket, int], waiting: selectors.BaseSelector
) -> None:
    """Send a child the signals that its client was sent; a client that has gone takes its child along."""
    try:
        numbers = client.recv(64)
    except ConnectionResetError:
        numbers = b""
    child = clients[client]
    for number in numbers or [signal.SIGKILL]:
        os.kill(child, number)  # not waited for yet, so nobody else has its number
    if not numbers:
        waiting.unregister(client)
        del clients[client]


def _become(request: dict[str, Any], streams: list[int]) -> list[str]:
    """Make this child what the client is: its streams, environment, folder and CPUs."""
    atexit.register(gc.unfreeze)  # an interpreter's end frees all there is
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cpus"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        buffered: Any = raw if unbuffered else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(
            buffered,
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "strict",
            line_buffering=not unbuffered and (number == 2 or os.isatty(number)),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
    random.seed()
    import numpy as np
    import torch

    np.random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdecimal() else len(request["cpus"]))
    words: list[str] = request["words"]
    return words


def run(words: list[str]) -> None:
    """Run a program as `python WORDS` does."""
    if words[0] == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)  # a program that was imported runs as if it had not been
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(words[0]).resolve().parent)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    load()
    # At the top, so that a child ends as an interpreter does.
    run(serve(sys.argv[1]))
