"""An OpenAI-compatible server of the bundled target, by our own engine in float64, that fails as it is told to.

    python -m tests.helpers.completions_server PORT

The process that is started loads the target and forks the one that serves. Where that dies, another is forked after
the time that it was told, so that a server which is gone and comes back costs no start of Python.

`POST /failures` takes a list of what is to happen to the next requests for completions, one each: {"status": 500},
with "retry_after" if that is to be told, {"cut": true} (half an answer), {"silent_s": 3}, {"die_s": 1} (the process
ends at once, and is back after as long), {"lie": {...}} (merged into the answer's usage), {"without_ids": true}, or
{} for none. `GET /asked` tells how many requests there were, and how many at most at a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = "tiny-float64"


class CompletionsServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, target: Any) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.target, self.failures = target, list[dict[str, Any]]()
        self.asked, self.at_once, self.most = 0, 0, 0
        self.lock, self.engine = threading.Lock(), threading.Lock()

    def complete(self, asked: dict[str, Any], failure: dict[str, Any]) -> dict[str, Any]:
        from engine.loop import generate
        from engine.settings import DecodeSettings
        from models.sampling import SamplingParams

        assert asked["model"] == MODEL
        prompt = asked["prompt"]
        special = asked.get("add_special_tokens", True)
        ids = self.target.encode(prompt, special_tokens=special) if isinstance(prompt, str) else prompt
        settings = DecodeSettings(
            max_new_tokens=asked["max_tokens"],
            sampling=SamplingParams(asked["temperature"], top_p=asked["top_p"]),
            stop_token_ids=frozenset(asked.get("stop_token_ids", [])) | self.target.stop_token_ids,
        )
        with self.engine:
            made = generate(self.target, [ids], settings, seeds=[asked["seed"]])
        (answer,), (stopped,) = made.token_ids, made.stopped
        skip = asked.get("skip_special_tokens", True)
        choice: dict[str, Any] = {
            "index": 0,
            "text": self.target.tokenizer.decode(answer[:-1] if stopped else answer, skip_special_tokens=skip),
            "finish_reason": "stop" if stopped else "length",
        }
        if asked.get("return_token_ids") and not failure.get("without_ids"):
            choice |= {"token_ids": answer, "prompt_token_ids": ids}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(answer)} | failure.get("lie", {})
        return {"object": "text_completion", "model": MODEL, "choices": [choice], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    server: CompletionsServer

    def do_GET(self) -> None:
        told: dict[str, Any] = {"data": [{"id": MODEL}]}
        if self.path == "/asked":
            told = {"asked": self.server.asked, "at_once": self.server.most}
        self._say(200, told)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        if self.path == "/failures":
            server.failures = asked
            server.asked = server.most = 0
            return self._say(200, {})
        with server.lock:
            failure = server.failures.pop(0) if server.failures else {}
            server.asked += 1
            server.at_once += 1
            server.most = max(server.most, server.at_once)
        try:
            reply = self._reply(asked, failure)
        finally:  # before it is sent: who has it may ask for the next at once
            with server.lock:
                server.at_once -= 1
        self._say(*reply)

    def _reply(
        self, asked: dict[str, Any], failure: dict[str, Any]
    ) -> tuple[int, dict[str, Any], dict[str, str], bool]:
        if "die_s" in failure:
            os._exit(int(10 * failure["die_s"]))
        time.sleep(failure.get("silent_s", 0))
        if "status" in failure:
            headers = {"Retry-After": str(failure["retry_after"])} if "retry_after" in failure else {}
            return failure["status"], {"error": {"message": f"told to fail: {failure['status']}"}}, headers, False
        return 200, self.server.complete(asked, failure), {}, bool(failure.get("cut"))

    def _say(self, status: int, told: dict[str, Any], headers: dict[str, str] | None = None, cut: bool = False) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main(port: int) -> None:
    import torch

    from models.target import load_target

    torch.set_num_threads(1)
    target = load_target("tiny", dtype="float64", device="cpu")
    while True:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            server = CompletionsServer(port, target)
            print("ready", flush=True)
            server.serve_forever()
        signal.signal(signal.SIGTERM, lambda *_: (os.kill(child, signal.SIGKILL), os._exit(0)))  # noqa: B023
        _, status = os.waitpid(child, 0)
        time.sleep(os.waitstatus_to_exitcode(status) / 10)


class Served:
    """A running server: where it is, and what it is told."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}"
        self.url = f"{self.root}/v1"

    def fail(self, *failures: dict[str, Any]) -> None:
        """What happens to the next requests; the counts of `asked` begin anew."""
        body = json.dumps(failures).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.root}/failures", body), timeout=10).close()

    def asked(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.root}/asked", timeout=10) as response:
            told: dict[str, int] = json.loads(response.read())
        return told


@contextmanager
def completions_server(port: int) -> Iterator[Served]:
    """The server in processes of its own, listening within."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.helpers.completions_server", str(port)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield Served(port)
        finally:
            process.terminate()


if __name__ == "__main__":
    main(int(sys.argv[1]))
