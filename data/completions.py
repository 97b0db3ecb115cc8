"""A client of OpenAI-compatible servers: what fails for a while is asked again, what is wrong is said at once.

Any number of threads may share one. Every request has a connection of its own: beside an answer that takes seconds to
write, opening one costs nothing, and none can have gone stale.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from models.errors import UserError

_DAY_S = 86400.0
_BUSY = (408, 409, 425, 429)  # as are all from 500 on


class Cancelled(Exception):
    """Another thread has failed: this one should not go on."""


class _Passing(Exception):
    """A failure that may pass. `wait_s` is how long the server wants to be left alone."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Client:
    """Asks `base_url`, which ends in /v1 as a rule, and asks again up to `retries` times.

    The waits in between double from `first_wait_s` to `longest_wait_s`, each by chance half to one and a half times as
    long, and at least as long as the server's Retry-After says. `timeout_s` is how long a server may be silent. Once
    `stopping` is set, waits end and `Cancelled` is raised. Raises UserError for a URL that is none.
    """

    base_url: str
    api_key: str | None = None
    timeout_s: float = 600.0
    retries: int = 8
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.base_url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            good = False
        if not good:
            raise UserError(f"{self.base_url!r} is no address of a server: write http://HOST:PORT/v1.")

    def get(self, path: str) -> dict[str, Any]:
        """What the server answers to GET. Raises as `post`."""
        return self._persist("GET", path, None)

    def post(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        """What the server answers to `asked`, as JSON.

        Raises UserError where the server refuses, with its own words, or fails more than `retries` times.
        """
        return self._persist("POST", path, json.dumps(asked).encode())

    def _persist(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        wait_s = self.first_wait_s
        for attempt in range(self.retries + 1):
            try:
                return self._once(method, path, body)
            except _Passing as failure:
                if attempt == self.retries:
                    raise UserError(
                        f"The server {self.base_url} failed {attempt + 1} times in a row, at last so: {failure}. What "
                        "it answered before is kept: the same command goes on once the server does."
                    ) from failure
                if self.stopping.wait(max(failure.wait_s, wait_s * random.uniform(0.5, 1.5))):
                    raise Cancelled from failure
                wait_s = min(2 * wait_s, self.longest_wait_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _once(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        parts = urlsplit(self.base_url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname is not None
        connection = kind(parts.hostname, parts.port, timeout=self.timeout_s)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, f"{parts.path.rstrip('/')}/{path}", body, headers)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError as error:
            raise _Passing(f"no answer in {self.timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status in _BUSY or response.status >= 500:
            wait_s = _retry_after_s(response.getheader("Retry-After"))
            raise _Passing(f"{response.status} {_message(content)}", wait_s)
        if response.status != 200:
            raise UserError(f"The server {self.base_url} refuses {path}: {response.status} {_message(content)}")
        try:
            found = json.loads(content)
        except ValueError as error:
            raise _Passing(f"its answer is not JSON ({error})") from error
        if not isinstance(found, dict):
            raise UserError(f"{self.base_url}/{path} answers with {type(found).__name__}: it is no such server.")
        return found


def _retry_after_s(told: str | None) -> float:
    """Seconds that a Retry-After header asks for: it holds a number or a date. 0 where it holds neither."""
    if told is None:
        return 0.0
    try:
        wait_s = float(told)
    except ValueError:
        try:
            wait_s = email.utils.parsedate_to_datetime(told).timestamp() - time.time()
        except ValueError:
            return 0.0
    return wait_s if 0 < wait_s < _DAY_S else 0.0


def _message(content: bytes) -> str:
    """What a server says of an error: the message in its JSON, or the first words of anything else."""
    text = content.decode(errors="replace")
    try:
        found = json.loads(text)
        error = found.get("error", found)
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = None
    return " ".join(str(message or text).split())[:300] or "without a word"
