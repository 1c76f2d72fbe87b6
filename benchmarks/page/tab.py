"""A tab of the gateway's page, run with the Python of `.venv-clients/browser`.

tab.py paint URL KEY TOKEN            {"first_paint_ms": the median of ROUNDS loads}
tab.py stream URL KEY TOKEN           {"frames_per_s", "slowest_frame_ms"} of NUM_TOKENS tokens
tab.py cluster URL KEY TOKEN WORKER   {"open": true}; after SECONDS {"longest_task_ms",
                                      "longest_opening_task_ms"};
                                      once WORKER is shown as lost {"lost_at": Unix time}
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time

from playwright.sync_api import Page, sync_playwright

from tests.support.account import Account
from tests.support.hearth_page import HearthPage, find_chromium, launch

ROUNDS = 11
SECONDS = 20.0
OPENING_S = 2.0  # time until all tiles are drawn
NUM_TOKENS = 20_000
TOKENS_PER_S = 2_000

# The answer of a model that is faster than any here, chunk by chunk.
FAST_ANSWER = """
const real = window.fetch;
window.fetch = (path, options) => {
  if (!String(path).includes('completions')) return real(path, options);
  const encoder = new TextEncoder();
  const started = performance.now();
  let sent = 0;
  const body = new ReadableStream({
    async pull(controller) {
      await new Promise((resolve) => setTimeout(resolve, 4));
      const due = Math.min(NUM, Math.ceil((performance.now() - started) * RATE / 1000));
      for (; sent < due; sent += 1) {
        const content = sent % 12 ? 'token ' : 'word.\\n';
        const chunk = { choices: [{ index: 0, delta: { content }, finish_reason: null }] };
        controller.enqueue(encoder.encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
      }
      if (sent === NUM) {
        controller.enqueue(encoder.encode('data: [DONE]\\n\\n'));
        controller.close();
      }
    },
  });
  return Promise.resolve(new Response(body));
};
window.frames_at = [];
const frame = (now) => { window.frames_at.push(now); requestAnimationFrame(frame); };
requestAnimationFrame(frame);
"""
LONG_TASKS = """
window.tasks = [];
new PerformanceObserver((list) => {
  for (const each of list.getEntries()) window.tasks.push([each.startTime, each.duration]);
}).observe({ type: 'longtask', buffered: true });
"""
LONGEST = """([from, to]) => Math.max(0, ...window.tasks
  .filter(([at]) => at >= from && at < to).map(([, duration]) => duration))"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"


def paint(page: Page, tab: HearthPage, _: str) -> None:
    times = []
    for _round in range(ROUNDS):
        page.goto(f"{tab.account.url}/")
        tab.wait_until(PAINT)
        times.append(page.evaluate(PAINT))
    show(first_paint_ms=statistics.median(times))


def stream(page: Page, tab: HearthPage, _: str) -> None:
    script = FAST_ANSWER.replace("NUM", str(NUM_TOKENS)).replace("RATE", str(TOKENS_PER_S))
    page.add_init_script(script)
    open_with_keys(page, tab, "#play")
    page.evaluate("window.frames_at = []")
    tab.ask("Write.")
    page.wait_for_selector("#stop-answer")
    page.wait_for_selector("#stop-answer", state="hidden", timeout=120_000)
    frames = page.evaluate("window.frames_at")
    gaps = [after - before for before, after in itertools.pairwise(frames)]
    rate = 1000 * len(gaps) / (frames[-1] - frames[0])
    show(frames_per_s=rate, slowest_frame_ms=max(gaps))


def cluster(page: Page, tab: HearthPage, worker: str) -> None:
    open_with_keys(page, tab, "#cluster")
    page.locator(".tile").first.wait_for()
    page.evaluate(LONG_TASKS)
    page.wait_for_timeout(OPENING_S * 1000)
    opened = page.evaluate("performance.now()")
    show(open=True)
    page.wait_for_timeout(SECONDS * 1000)
    opening, live = (page.evaluate(LONGEST, span) for span in ((0, opened), (opened, 1e12)))
    show(longest_task_ms=live, longest_opening_task_ms=opening)
    heading = page.get_by_role("heading", name=worker, exact=True)
    page.locator(".tile.lost", has=heading).wait_for(timeout=60_000)
    show(lost_at=time.time())


def open_with_keys(page: Page, tab: HearthPage, fragment: str) -> None:
    """Opens the page with keys. It does not wait for models: no worker here can serve one."""
    page.goto(f"{tab.account.url}/{fragment}")
    page.locator("#keys").wait_for()  # opens by itself
    tab.enter_keys(tab.account.token, tab.account.operator_token)


def show(**figures: float) -> None:
    print(json.dumps(figures), flush=True)


def main(mode: str, url: str, api_key: str, operator_token: str, worker: str = "") -> None:
    chromium = find_chromium()
    assert chromium is not None, "no chromium"
    with sync_playwright() as playwright:
        page = launch(playwright, chromium).new_page()
        tab = HearthPage(page, Account(url, "", api_key, operator_token))
        {"paint": paint, "stream": stream, "cluster": cluster}[mode](page, tab, worker)


if __name__ == "__main__":
    main(*sys.argv[1:])
