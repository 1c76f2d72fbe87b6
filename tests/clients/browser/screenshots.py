"""The browser's part of `scripts/screenshots`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from tests.support.account import BROWSER, EYES, Account, read_accounts
from tests.support.hearth_page import HearthPage, find_chromium, launch

SERVICES = Path(__file__).parents[3] / "services"
FOLDER = SERVICES / "gateway" / "operator" / "page" / "screenshots"
STAR = SERVICES / "guides" / "examples" / "star.png"
MAX_BYTES = 200_000
DESKTOP = {"viewport": {"width": 1280, "height": 800}}
README = {"viewport": {"width": 1000, "height": 560}, "device_scale_factor": 1.6}
ANSWER_S = 5.0  # without pauses
PHONE = {"viewport": {"width": 390, "height": 780}, "device_scale_factor": 1.5}


def open_tab(browser: Browser, account: Account, fragment: str, **options: Any) -> HearthPage:
    tab = HearthPage(browser.new_context(**options).new_page(), account)
    tab.open(fragment)
    return tab


def save(tab: HearthPage, name: str, *, is_whole: bool = False) -> None:
    path = FOLDER / f"{name}.png"
    tab.page.screenshot(path=path, full_page=is_whole)
    assert path.stat().st_size <= MAX_BYTES, f"{path} is larger than {MAX_BYTES} bytes"


def take_playground(browser: Browser, account: Account) -> None:
    tab = open_tab(browser, account, "", **DESKTOP)
    tab.answer("What is Hearth?")
    tab.page.click("summary:text-is('Tools')")
    tab.page.click("#tools-example")
    tab.fill_extra('{"tool_choice": "required", "temperature": 0}')
    tab.answer("What is the weather in Oslo?")
    tab.page.locator(".workers a").last.wait_for()
    tab.page.evaluate("document.querySelector('#settings').scrollTo(0, 0)")
    save(tab, "playground")


def take_picture(browser: Browser, account: Account) -> None:
    tab = open_tab(browser, account, "", **DESKTOP)
    with tab.page.expect_file_chooser() as chooser:
        tab.page.click("#picture")
    chooser.value.set_files(STAR)
    tab.page.locator(".composer img").wait_for()
    tab.answer("What is in this picture?")
    tab.page.locator(".workers a").last.wait_for()
    save(tab, "picture")


def take_compare(browser: Browser, account: Account) -> None:
    tab = open_tab(browser, account, "", **DESKTOP)
    tab.page.check("#compare")
    tab.page.check("#logprobs")
    tab.page.fill("#temperature", "0")
    tab.page.fill("#temperature-b", "1.4")
    tab.page.fill("#seed", "7")
    tab.answer("What does a prefill worker do?")
    tab.page.locator(".workers a").nth(1).wait_for()
    tab.page.fill("#prompt", "What does a prefill worker do? And a decode worker?")
    tab.page.click("#try-run")
    tab.page.locator(".dry-run").wait_for()
    tab.page.evaluate("document.querySelector('#second').scrollIntoView({ block: 'end' })")
    tab.page.evaluate("scrollTo(0, 0)")
    save(tab, "compare")


def take_timeline(browser: Browser, account: Account) -> None:
    """Freezes the worker of an answer, kills the next one, and takes what the page shows: while the
    answer streams, and its timeline.
    """
    tab = open_tab(browser, account, "", **DESKTOP)
    tab.answer("What is Hearth?")
    figures = tab.page.locator(".figures").inner_text().split()
    num_tokens = int(ANSWER_S * float(figures[figures.index("Tokens/s") + 1]))
    tab.fill_extra(f'{{"ignore_eos": true, "temperature": 0, "max_tokens": {num_tokens}}}')
    tab.ask("What happens when a decode worker dies?")
    frozen = account.pids[tab.serving_worker()]
    os.kill(frozen, signal.SIGSTOP)
    try:
        second = tab.page.locator(".badge.moved", has_text="moved to").inner_text().split()[2]
        save(tab, "moved")
        tab.page.wait_for_timeout(800)
        os.kill(account.pids[second], signal.SIGKILL)
        tab.page.locator(".badge.moved").get_by_text("moved 2").wait_for(timeout=90_000)
    finally:
        os.kill(frozen, signal.SIGCONT)
    address = tab.page.locator(".workers a").last.get_attribute("href") or ""
    tab = open_tab(browser, account, address, **README)
    tab.page.locator(".waterfall").wait_for()
    tab.page.locator("#find-request").evaluate("(form) => { form.hidden = true; }")
    save(tab, "timeline", is_whole=True)


def take_cluster(browser: Browser, account: Account) -> None:
    tab = open_tab(browser, account, "#cluster", color_scheme="dark", **DESKTOP)
    tab.page.locator(".tile").nth(2).wait_for()
    talking = open_tab(browser, account, "", **DESKTOP)
    for _ in range(12):
        talking.answer("What does a decode worker do?")
    os.kill(account.pids["decode-2"], signal.SIGSTOP)
    try:
        tab.page.locator(".tile.lost").wait_for()
        talking.ask("What is paged attention?")
        tab.page.wait_for_timeout(1500)
        save(tab, "cluster")
    finally:
        os.kill(account.pids["decode-2"], signal.SIGCONT)


def take_phone(browser: Browser, account: Account) -> None:
    tab = open_tab(browser, account, "", **PHONE)
    tab.answer("What is the KV cache?")
    tab.page.locator(".workers a").wait_for()
    save(tab, "phone")


def main() -> None:
    chromium = find_chromium()
    if chromium is None:
        sys.exit("screenshots: no chromium on the PATH, and $HEARTH_CHROMIUM is not set")
    accounts = read_accounts()
    account = accounts[BROWSER]
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = launch(playwright, chromium)
        take_picture(browser, accounts[EYES])
        take_playground(browser, account)
        take_compare(browser, account)
        take_phone(browser, account)
        take_cluster(browser, account)
        take_timeline(browser, account)  # last: it kills a worker


if __name__ == "__main__":
    main()
