"""A stand-in for W&B's server, on loopback: it answers `wandb sweep` and `wandb agent`, and hands out trials."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

PLACE = {"id": "P1", "name": "sweeps", "entity": {"id": "E1", "name": "nobody"}}


class SweepServer(ThreadingHTTPServer):
    """One sweep, whose `trials` (values by the parameter's name) are given to the agent one after another."""

    def __init__(self, trials: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.waiting = list(enumerate(trials))
        self.config: dict[str, Any] = {}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(query)
        if "upsertSweep" in query:
            self.config = yaml.safe_load(variables["config"])
            return {"upsertSweep": {"sweep": {"name": "s1", "project": PLACE}, "configValidationWarnings": []}}
        if "createAgent" in query:
            return {"createAgent": {"agent": {"id": "A1"}}}
        if "agentHeartbeat" in query:
            return {"agentHeartbeat": {"agent": {"id": "A1"}, "commands": json.dumps(self.commands(variables))}}
        if "sweep(" in query:
            sweep = {
                "id": "S1", "name": "s1", "method": self.config.get("method"), "state": "RUNNING", "description": None,
                "config": yaml.safe_dump(self.config), "createdAt": "2026-01-01T00:00:00", "heartbeatAt": None,
                "updatedAt": None, "earlyStopJobRunning": False, "bestLoss": None, "controller": None,
                "scheduler": None, "runs": {"edges": []},
            }  # fmt: skip
            return {"project": {**PLACE, "sweep": sweep}}
        viewer = {"id": "V1", "username": "nobody", "entity": "nobody", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer, "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None}}

    def commands(self, variables: dict[str, Any]) -> list[dict[str, Any]]:
        """The next trial once none of the agent's runs goes on, and `exit` behind the last."""
        if json.loads(variables.get("runState") or "{}"):
            return []
        if not self.waiting:
            return [{"type": "exit"}]
        number, values = self.waiting.pop(0)
        args = {name: {"value": value} for name, value in values.items()}
        return [{"type": "run", "run_id": f"trial{number}", "program": self.config["program"], "args": args}]


class _Handler(BaseHTTPRequestHandler):
    server: SweepServer

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/graphql":
            asked = json.loads(content)
            body = json.dumps({"data": self.server.answer(asked["query"], asked.get("variables") or {})}).encode()
        else:  # what it reports of itself
            body = b"{}"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def sweep_server(trials: list[dict[str, Any]]) -> Iterator[SweepServer]:
    """The server, listening within."""
    server = SweepServer(trials)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
