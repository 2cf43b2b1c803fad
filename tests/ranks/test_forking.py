"""A program behaves the same in a fork of the fork server and in an interpreter of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launching import environment, python, wait_until

PRINT_ENVIRONMENT = """
import json, os, sys, torch
print(json.dumps([
    __name__, sys.argv, sys.path[0], os.getcwd(), sorted(os.environ.items()), sorted(os.sched_getaffinity(0)),
    sys.stdin.read(), torch.get_num_threads(), sys.stdout.line_buffering, sys.stdout.write_through,
    sys.stderr.line_buffering, os.environ.get("ONLY_HERE"), "ready" in sys.modules, __file__,
]))
print("to the other stream", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
WAIT_FOR_A_SIGNAL = """
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
pathlib.Path(sys.argv[1]).write_text(str(__import__("os").getpid()))
while True:
    time.sleep(0.05)
"""


def ran(plain: bool, *command: str, first: Sequence[str] = (), **settings: Any) -> tuple[int, str, str]:
    settings["env"] = environment(**settings.pop("extra", {}))
    command = [*first, *python(plain), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **settings)
    return done.returncode, done.stdout, done.stderr


def as_file(folder: Path, text: str) -> str:
    (folder / "program.py").write_text(text)
    return str(folder / "program.py")


def test_a_fork_has_the_environment_of_a_plain_interpreter(tmp_path):
    as_file(tmp_path, PRINT_ENVIRONMENT)
    last_cpu = ("taskset", "--cpu-list", str(max(os.sched_getaffinity(0))))
    extra = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", "ONLY_HERE": "a b"}
    settings = {"first": last_cpu, "cwd": tmp_path, "input": "a line\n", "extra": extra}
    expected, found = (ran(plain, "-m", "program", "3", "two words", **settings) for plain in (True, False))
    assert found == expected
    assert (found[0], found[2]) == (3, "to the other stream\n")


def test_a_fork_ends_like_a_plain_interpreter(tmp_path):
    for text in ("raise ValueError('wrong')", "import os; os.kill(os.getpid(), 9)", "import os; os.abort()"):
        status, _, stderr = ran(False, as_file(tmp_path, text))
        expected, _, expected_stderr = ran(True, as_file(tmp_path, text))
        assert status == expected != 0
        assert stderr.splitlines()[-1:] == expected_stderr.splitlines()[-1:]
    text = "atexit.register(print, 'second'); threading.Thread(target=print, args=('first',)).start()"
    program = as_file(tmp_path, f"import atexit, threading; {text}")
    assert ran(False, program) == ran(True, program) == (0, "first\nsecond\n", "")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_is_forwarded_to_the_fork(tmp_path, number):
    file = tmp_path / "pid"
    with subprocess.Popen(
        [*python(), as_file(tmp_path, WAIT_FOR_A_SIGNAL), str(file)], env=environment()
    ) as process:
        wait_until(lambda: file.exists() and file.read_text(), 30, "the program")
        child = int(file.read_text())
        assert child != process.pid
        process.send_signal(number)
        assert process.wait(timeout=30) == (75 if number == signal.SIGUSR1 else -number)
        wait_until(lambda: not Path(f"/proc/{child}").exists(), 30, "the child's end")


def test_variables_that_libraries_read_on_loading_cannot_change(tmp_path):
    status, _, stderr = ran(False, as_file(tmp_path, "pass"), extra={"OMP_WAIT_POLICY": "ACTIVE"})
    assert status == 1
    assert "refused: OMP_WAIT_POLICY cannot change" in stderr


def test_a_warning_is_an_error(tmp_path):
    program = as_file(tmp_path, "import sys, warnings; warnings.warn(sys.argv[1])")
    for plain in (True, False):
        assert ran(plain, program, "The .grad attribute of a Tensor that is not a leaf Tensor") == (0, "", "")
        status, _, stderr = ran(plain, program, "of another kind")
        assert status == 1
        assert stderr.splitlines()[-1] == "UserWarning: of another kind"


def test_numbers_drawn_without_a_seed_differ(tmp_path):
    program = as_file(tmp_path, "import random, numpy; print(random.random(), numpy.random.rand())")
    first, second = ran(False, program), ran(False, program)
    assert first[0] == second[0] == 0
    assert not set(first[1].split()) & set(second[1].split())
