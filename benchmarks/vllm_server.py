"""A real `vllm serve` on a free localhost port, stopped with all its children whatever happens."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 300.0
REQUEST_SECONDS = 300.0
GRACE_SECONDS = 5.0

#: A proxy named in the environment must not see requests to this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LOG_PREFIX = re.compile(r"^(\(\S+ pid=\d+\)\s*)?([A-Z]+ \d\d-\d\d [\d:]+ \[[^]]*\]\s*)?")
_ERROR = re.compile(r"(error|exception)[:,] \S", re.IGNORECASE)


class ServerError(Exception):
    """A server did not start or did not answer; `str()` is one line that names its log."""


@dataclass(frozen=True)
class Server:
    """A running server: its name for messages, address and log file."""

    name: str
    url: str
    log: Path

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON answer to `body` posted to `path`; `ServerError` if there is none."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with _DIRECT.open(request, timeout=REQUEST_SECONDS) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer
        except urllib.error.HTTPError as error:
            reason = f"status {error.code}: " + " ".join(error.read().decode(errors="replace").split())[:200]
        except (OSError, ValueError) as error:
            reason = f"no answer: {error}"
        raise ServerError(f"{self.name}: POST {path} gave {reason}; log: {self.log}")

    def healthy(self) -> bool:
        """Whether the server says that it is ready for requests."""
        try:
            with _DIRECT.open(self.url + "/health", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def serve(name: str, arguments: Sequence[str], log: Path, pythonpath: Path | None = None) -> Iterator[Server]:
    """Run `vllm serve` of this Python environment with `arguments` until the block ends.

    `pythonpath` names a folder whose `vllm` stands in for the installed one. Raises `ServerError`
    if the server dies or is not ready within `START_SECONDS`.
    """
    port = _free_port()
    program = Path(sys.executable).with_name("vllm")
    command = [str(program), "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    if not program.exists():
        raise ServerError(f"{program} is missing: install the fork's wheel into this environment (make setup)")
    server = Server(name, f"http://127.0.0.1:{port}", log)
    with process_group(command, log, environment(pythonpath)) as process:
        _wait_until_ready(server, process)
        yield server


@contextmanager
def process_group(command: Sequence[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` as a process group of its own, output to `log`; at the end no process of it is left."""
    log.parent.mkdir(parents=True, exist_ok=True)
    process = None
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                cwd=log.parent, env=environment, start_new_session=True,
            )  # fmt: skip
        yield process
    finally:
        if process is not None:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the group to end; kill what is left after `GRACE_SECONDS`, or at once if this wait is interrupted."""
    try:
        _signal(process, signal.SIGTERM)
        _wait_until_gone(process)
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()
        _wait_until_gone(process)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if _alive(process):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _wait_until_gone(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while _alive(process) and time.monotonic() < deadline:
        time.sleep(0.05)


def _alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether any process of the group still runs. Orphans may stay zombies where PID 1 reaps nothing."""
    process.poll()
    for other in psutil.process_iter():
        try:
            if os.getpgid(other.pid) == process.pid and other.status() != psutil.STATUS_ZOMBIE:
                return True
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return False


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not server.healthy():
        if process.poll() is not None:
            raise ServerError(
                f"{server.name}: the server ended with status {process.returncode} before it was ready: "
                f"{last_meaningful_line(server.log)}; log: {server.log}"
            )
        if time.monotonic() > deadline:
            raise ServerError(f"{server.name}: the server was not ready after {START_SECONDS:.0f} s; log: {server.log}")
        time.sleep(0.2)


def last_meaningful_line(log: Path) -> str:
    """The last line of `log` that states an error, without log prefix; the last line of all if none does.

    The API server ends by pointing at an error "above" in the engine's output, which says more.
    """
    lines = [_LOG_PREFIX.sub("", _COLOUR.sub("", line)) for line in log.read_text(errors="replace").splitlines()]
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    causes = [line for line in errors if "See root cause above" not in line]
    return (causes or errors or lines or ["the log is empty"])[-1][:300]


def environment(pythonpath: Path | None) -> dict[str, str]:
    """This program's environment for a vLLM that it starts; `pythonpath` as for `serve`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if pythonpath is not None:
        environment["PYTHONPATH"] = str(pythonpath)
    return environment | {
        "VLLM_SERVER_DEV_MODE": "1",  # brings the /collective_rpc route
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
