"""A headless Chromium, spoken to over two pipes by the DevTools protocol: no port, no driver, no network."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


class Browser:
    """One page of a browser; `messages` of its console and `requests` but for the page itself, since `open`."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self._number, self._session = 0, ""
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers to a command."""
        self._number += 1
        told = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            told["sessionId"] = self._session
        self._write.write(json.dumps(told).encode() + b"\0")
        self._write.flush()
        while True:
            said = self._next()
            if said.get("id") == self._number:
                assert "error" not in said, said
                return dict(said["result"])

    def _next(self) -> dict[str, Any]:
        found = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            assert byte, "the browser has ended"
            found += byte
        said: dict[str, Any] = json.loads(found)
        about, method = said.get("params", {}), said.get("method")
        if method == "Runtime.consoleAPICalled":
            self.messages.append(json.dumps(about["args"]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(about["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.messages.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not about["request"]["url"].startswith("data:"):
            self.requests.append(about["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        return said

    def open(self, page: Path, *, width: int = 1200, dark: bool = False, media: str = "") -> None:
        """Opens a file in a window of a width, on a medium such as "print", and waits until it is loaded."""
        self.messages.clear()
        self.requests.clear()
        self._loaded = False
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.ask("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._next()
        self.requests.remove(page.as_uri())

    def value(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression, awaited where it is a promise."""
        said = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def picture(self, path: Path, *, height: int | None = None) -> None:
        """Writes a picture of the whole page, or of its first pixels."""
        whole = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": whole["width"], "height": height or whole["height"], "scale": 1}
        data = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, ended at the end."""
    assert CHROMIUM is not None
    (its_read, write), (read, its_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="shoal-browser-", ignore_cleanup_errors=True) as profile:
        # The protocol is on descriptors 3 and 4.
        script = f'exec "$0" "$@" 3<&{its_read} 4>&{its_write}'
        flags = [*_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        process = subprocess.Popen(
            ["/bin/bash", "-c", script, CHROMIUM, *flags],
            pass_fds=(its_read, its_write),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(its_read)
        os.close(its_write)
        found = Browser(read, write)
        try:
            yield found
        finally:
            found._session = ""
            with contextlib.suppress(Exception):
                found.ask("Browser.close")
            found._read.close()
            with contextlib.suppress(OSError):
                found._write.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
