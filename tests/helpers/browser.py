"""A headless Chromium, driven through chromedriver's HTTP interface (W3C WebDriver) with the standard library alone.

Debian's packages are chromium and chromium-driver; `available` says whether both are on the PATH.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing can be fetched
)  # fmt: skip


def chromium() -> str | None:
    """The browser's command, None where there is none."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def available() -> bool:
    """Whether a browser and its driver are installed."""
    return chromium() is not None and shutil.which("chromedriver") is not None


class Browser:
    """One window of one session."""

    def __init__(self, address: str) -> None:
        self._address = address
        options = {"binary": chromium(), "args": list(_FLAGS)}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def open(self, path: Path, width: int, dark: bool, height: int = 844) -> None:
        """Show a file as a screen of that width shows it, in light or dark mode."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", sizes)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._call("POST", f"{self._session}/url", {"url": path.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def devtools(self, command: str, values: dict[str, Any]) -> Any:
        """A command of the DevTools protocol."""
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": values})

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG, as long as it is."""
        data = self.devtools("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data["data"]))

    def console(self) -> list[str]:
        """What was logged since the last call, errors of loading too."""
        return [entry["message"] for entry in self._call("POST", f"{self._session}/se/log", {"type": "browser"})]

    def close(self) -> None:
        """End the session and the browser."""
        self._call("DELETE", self._session)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode()[:500]}") from error


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, closed at the end."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert driver.stdout is not None
        port = None
        for line in driver.stdout:  # "ChromeDriver was started successfully on port 40123."
            if "started successfully on port" in line:
                port = int(line.rstrip().rstrip(".").split()[-1])
                break
        assert port is not None, "chromedriver did not start"
        opened = Browser(f"http://127.0.0.1:{port}")
        try:
            yield opened
        finally:
            opened.close()
    finally:
        driver.terminate()
        driver.wait(timeout=30)
