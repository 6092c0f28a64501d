"""What goes wrong is one line and leaves nothing; a signal ends the work; a wait says what it is for."""

import re
import resource
import shlex
import signal
import subprocess
import sys
import threading

import pytest

from secateur.checkpoints import sparsify_directory as checkpoint_sparsification
from secateur.cli import terminal
from support.commands import run


def test_debug_shows_the_traceback(tmp_path):
    result = run("inspect", tmp_path / "gone", env={"SECATEUR_DEBUG": "1"})
    assert isinstance(result.exception, ValueError)


def test_of_several_processes_the_first_says_at_once_what_is_wrong(tmp_path, monkeypatch):
    """The others wait until torchrun ends them for that, and say what is wrong with them alone."""
    waits = []
    monkeypatch.setattr(terminal.time, "sleep", waits.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for rank, waited in ((0, []), (1, [terminal._PATIENCE])):
        monkeypatch.setenv("RANK", str(rank))
        assert "gone" in run("inspect", tmp_path / "gone").stderr
        assert waits == waited


@pytest.mark.long
def test_a_full_disk_is_one_line(model, tmp_path):
    """A limit on file sizes stands in for the full disk: the copy fails in the middle."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))

    command = [sys.executable, "-m", "secateur", "prune", model, "--out", tmp_path / "out", "-s", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"secateur: .*out\.unfinished-.*File too large\.\n", done.stderr), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (OSError(28, "No space left on device", "/disk/out"), 2, r"/disk/out: No space left on device\."),
        (PermissionError(13, "Permission denied", "/disk"), 2, r"/disk: Permission denied\."),
        (OSError(30, "Read-only file system", "/disk"), 2, r"Read-only file system\."),
        (MemoryError(), 2, "not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            2,
            "not enough memory",
        ),
        (KeyboardInterrupt(), 130, r"interrupted; nothing was written\."),
    ],
)
def test_failures_are_one_line_and_leave_nothing(model, tmp_path, monkeypatch, failure, code, message):
    def fail(*_):
        raise failure

    monkeypatch.setattr(checkpoint_sparsification, "write_tensor", fail)
    result = run("prune", model, "--out", tmp_path / "out", "-s", "0.5")
    assert result.exit_code == code
    assert re.fullmatch(rf"secateur: .*{message}\n", result.stderr) or message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_fault_of_our_own_is_not_hidden(model, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(checkpoint_sparsification, "write_tensor", fail)
    assert isinstance(run("prune", model, "--out", tmp_path / "out", "-s", "0.5").exception, RuntimeError)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


STALLED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
from secateur.checkpoints import sparsify_directory as checkpoint_sparsification
def wait(*_):
    print("writing", flush=True)
    time.sleep(60)
checkpoint_sparsification.write_tensor = wait
from secateur.cli import main
main(["prune", sys.argv[1], "--out", sys.argv[2], "-s", "0.5"])
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
@pytest.mark.long
def test_signals(model, tmp_path, number, code):
    command = [sys.executable, "-c", STALLED, model, tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in stderr
    left = sorted(path.name for path in tmp_path.iterdir())
    if number == signal.SIGKILL:  # nobody can tidy up: the name says what it is
        assert re.fullmatch(r"out\.unfinished-[0-9a-f]{8}", left[1])
        left.pop(1)
    assert left == ["dense"]


def test_shrink_says_what_the_wait_is_for(zoo, monkeypatch, capsys):
    monkeypatch.setattr("secateur.support.PATIENCE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with terminal.waiting("Thinking"):
        threading.Event().wait(0.2)
    assert "Thinking" in capsys.readouterr().err
    monkeypatch.setattr("secateur.support.PATIENCE", 60.0)
    with terminal.waiting("Thinking"):
        pass
    assert "Thinking" not in capsys.readouterr().err
    monkeypatch.setenv("SECATEUR_PROGRESS", "0")
    monkeypatch.setattr("secateur.support.PATIENCE", 0.0)
    with terminal.waiting("Thinking"):
        threading.Event().wait(0.1)
    assert capsys.readouterr().err == ""


def test_a_command_line_is_what_a_shell_takes():
    line = terminal.command_line(
        "prune", "a b", sparsity=0.5, exclude=["*.0", "it's"], pattern=None, zstd=False, seed=0
    )
    words = ["secateur", "prune", "a b", "--sparsity", "0.5", "--exclude", "*.0", "--exclude", "it's", "--seed", "0"]
    assert shlex.split(line) == words
