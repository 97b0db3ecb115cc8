"""Commands of this project in forked processes, so that each costs no imports; and faults that strike them for real.

    python -m tests.helpers.fork_server

A line of JSON asks for a command, and one answers with its exit code. `Forks` is the other end. The server imports what
commands need, runs nothing, and forks: what strikes a child is no simulation. SIGKILL ends it, a write to its full disk
is refused by the kernel.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_JOBS = {"train": "train.run", "export": "train.export", "acceptance": "eval.acceptance"}
_HEAVY = (
    "datasets", "lightning", "matplotlib.pyplot", "pandas", "peft", "train.pipeline", "train.run", "train.export",
    "eval.acceptance", "eval.prompt_sets", "train.feature_regression", "models.drafter.eagle",
)  # fmt: skip
_CLONE_NEWNS, _CLONE_NEWUSER, _DISK_MB = 0x00020000, 0x10000000, 64
_FILLER = "filler"


@dataclass(frozen=True)
class Fault:
    """What strikes at the `call`-th call of `where` ("module:function" or "module:Class.method"), before it begins.

    `what` is the name of a signal, "full disk", or "small files": writes past 1,000 bytes of a file are then refused.
    """

    what: str
    where: str
    call: int = 1


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code or minus the signal, its output, and how often what is counted was called."""

    code: int
    output: str
    calls: dict[str, int]


class Forks:
    """The server, and commands that it is asked for, one at a time."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "160"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def run(
        self, folder: Path, script: str, *arguments: str, fault: Fault | None = None, counted: tuple[str, ...] = ()
    ) -> Ended:
        """Run a command in `folder`, where outputs/ is on a small disk of its own if it is to be full."""
        folder.mkdir(parents=True, exist_ok=True)
        request = {
            "folder": str(folder), "script": script, "arguments": arguments, "counted": counted,
            "fault": None if fault is None else asdict(fault),
        }  # fmt: skip
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        ended = json.loads(self._server.stdout.readline())
        if (kept := folder / "kept").exists():  # what was on the small disk
            shutil.rmtree(folder / "outputs")
            kept.rename(folder / "outputs")
        told = folder / "calls.json"
        calls = json.loads(told.read_text()) if told.exists() else {}
        told.unlink(missing_ok=True)
        return Ended(ended["code"], ended["output"], calls)


def can_mount() -> bool:
    """Whether a process may have a small disk of its own here."""
    pid = os.fork()
    if pid == 0:
        try:
            _own_mounts()
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def _own_mounts() -> None:
    """Let this process alone see what it mounts."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    flags = _CLONE_NEWNS if user == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None):  # private, and all below it
        raise OSError(ctypes.get_errno(), "mount")


def _small_disk(folder: Path) -> None:
    """Put outputs/ on a disk of its own, with what it holds."""
    outputs, before = folder / "outputs", folder / "before"
    _own_mounts()
    outputs.mkdir(exist_ok=True)
    shutil.copytree(outputs, before)
    size = f"size={_DISK_MB}m".encode()
    if ctypes.CDLL(None, use_errno=True).mount(b"none", str(outputs).encode(), b"tmpfs", 0, size):
        raise OSError(ctypes.get_errno(), "mount")
    shutil.copytree(before, outputs, dirs_exist_ok=True)
    shutil.rmtree(before)


def _strike(what: str) -> None:
    if what == "full disk":
        with (Path("outputs") / _FILLER).open("wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                return
    if what == "small files":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        return
    os.kill(os.getpid(), signal.Signals[what])


def _watch(place: str, before: Callable[[], None]) -> None:
    """Call `before` ahead of every call of "module:function" or "module:Class.method"."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        before()
        return original(*args, **kwargs)

    setattr(owner, name, watched)


def _run(request: dict[str, Any]) -> None:
    """In a child: the command, as the command line would have it."""
    folder, fault, calls = Path(request["folder"]), request["fault"], Counter[str]()
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    full = fault is not None and fault["what"] == "full disk"
    if full:
        _small_disk(folder)
    for place in request["counted"]:
        _watch(place, lambda place=place: calls.update([place]))
    if fault is not None:
        met = Counter[str]()

        def strike() -> None:
            met.update(["call"])
            if met["call"] == fault["call"]:
                _strike(fault["what"])

        _watch(fault["where"], strike)
    from conf.compose import main

    sys.argv = [request["script"], *request["arguments"]]
    code: Any = 0
    try:
        main(request["script"], importlib.import_module(_JOBS[request["script"]]).job)
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if full:
        (Path("outputs") / _FILLER).unlink(missing_ok=True)
        shutil.copytree("outputs", "kept")
    Path("calls.json").write_text(json.dumps(calls))
    os._exit(code)


def serve() -> None:
    """Answer requests until there are no more."""
    for name in _HEAVY:
        importlib.import_module(name)
    from models.target import load_target

    load_target("tiny", device="cpu")  # transformers imports an architecture when it is first loaded
    for line in sys.stdin:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            for descriptor in (1, 2):
                os.dup2(write, descriptor)
            os.close(write)
            try:
                _run(json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(99)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            output = pipe.read().decode(errors="replace")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"code": code, "output": output}), flush=True)


if __name__ == "__main__":
    serve()
