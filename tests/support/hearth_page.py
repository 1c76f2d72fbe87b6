"""The gateway's page in a browser: opens it, and records what must not happen in it."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, Playwright

from tests.support.account import Account

VARIABLE = "HEARTH_CHROMIUM"
POLL_MS = 20
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
REPORT_VIOLATIONS = """
addEventListener('securitypolicyviolation',
  (event) => console.error('CSP', event.violatedDirective, event.blockedURI))
"""

FIND_SERVING = """
fetch('/v1/cluster', { headers: {
  Authorization: `Bearer ${sessionStorage.getItem('hearth.operator_token')}` } })
  .then((response) => response.json())
  .then(({ processes }) => Object.entries(processes)
    .find(([id, { num_running: num }]) => id.startsWith('decode') && num)?.[0] ?? '')
"""


def find_chromium() -> str | None:
    """Returns the path of Chromium: of $HEARTH_CHROMIUM, else of the PATH."""
    return os.environ.get(VARIABLE) or shutil.which("chromium")


def launch(playwright: Playwright, chromium: str) -> Browser:
    return playwright.chromium.launch(
        executable_path=chromium, headless=True, args=list(ARGUMENTS), timeout=60_000
    )


@dataclass
class HearthPage:
    """A tab with the account's keys."""

    page: Page
    account: Account
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, fragment: str = "", *, has_keys: bool = True) -> None:
        self.page.add_init_script(REPORT_VIOLATIONS)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"{self.account.url}/{fragment}")
        if fragment != "docs" and "key=" not in fragment:
            self.page.locator("#keys").wait_for()
        if has_keys:
            self.enter_keys(self.account.token, self.account.operator_token)
            self.page.locator("#keys").wait_for(state="hidden")
            if self.account.token:
                self.wait_until("document.querySelector('#model').options.length > 0")

    def wait_until(self, expression: str, timeout_s: float = 20) -> None:
        """Polls from here: the page's policy stops Playwright's own polling, which uses `eval`."""
        deadline = time.monotonic() + timeout_s
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(POLL_MS)

    def enter_keys(self, api_key: str, operator_token: str) -> None:
        if not self.page.locator("#keys").is_visible():
            self.page.click("#open-keys")
        self.page.fill("#api-key", api_key)
        self.page.fill("#operator-token", operator_token)
        self.page.click("#keys-form button[type=submit]")

    def ask(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def wait_for_end(self) -> None:
        self.page.wait_for_selector("#stop-answer", state="hidden")

    def answer(self, text: str) -> str:
        """Asks, and returns the text of the last answer as it is shown."""
        self.ask(text)
        self.page.locator(".turn.assistant").last.wait_for()
        self.wait_for_end()
        return self.page.locator(".turn.assistant .content").last.inner_text()

    def serving_worker(self) -> str:
        """Returns the decode worker of the only running request, once its load is known."""
        worker = ""
        while not worker:
            worker = self.page.evaluate(FIND_SERVING)
        return worker

    def fill_extra(self, json: str) -> None:
        """Adds fields to the next requests."""
        self.page.evaluate("document.querySelector('#extra').closest('details').open = true")
        self.page.fill("#extra", json)

    def check_clean(self) -> None:
        """No error, no violation of the policy, no request to another origin."""
        assert self.problems == []
        hosts = {urlsplit(url).netloc for url in self.requests if not url.startswith("data:")}
        assert hosts == {urlsplit(self.account.url).netloc}

    def _on_console(self, message: object) -> None:
        text = f"{message.type}: {message.text}"  # type: ignore[attr-defined]
        if message.type in ("error", "warning"):  # type: ignore[attr-defined]
            self.problems.append(text)
