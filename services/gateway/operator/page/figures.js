// The live figures of one answer, from the arrival of its chunks and from the usage at its end.

import { count, make, percentile, seconds, setText } from "./dom.js";
import { survived } from "./moves.js";

const MIN_GAP_MS = 0.5;
export const timelineLink = (id) => make("a", { href: `#request/${encodeURIComponent(id)}` }, "timeline");

const NAMES = ["First token", "Between p50", "Between p99", "Tokens/s", "Tokens", "Cached"];

export class Figures {
  #started = performance.now();
  #last = null;
  #first = null;
  #gaps = [];
  #batch = { from: 0, size: 0 };
  #num = 0;
  #cells = {};

  constructor(seed) {
    this.seed = seed === undefined ? "" : `seed ${seed}`;
    this.workers = make("span", { class: "workers" }, this.seed);
    this.element = make("dl", { class: "figures", "aria-label": "Figures of this answer" });
    for (const name of NAMES) {
      this.#cells[name] = make("dd", {}, "–");
      this.element.append(make("div", {}, make("dt", {}, name), this.#cells[name]));
    }
  }

  // A chunk with text, reasoning or a part of a call.
  arrived() {
    const now = performance.now();
    if (this.#first === null) this.#first = now;
    else if (now - this.#last < MIN_GAP_MS && this.#batch.size) this.#spread(this.#last, this.#batch.size + 1);
    else {
      this.#batch = { from: this.#last, size: 0 };
      this.#spread(now, 1);
    }
    this.#last = now;
    this.#num += 1;
  }

  // Chunks that arrive together share the time since the chunk before them.
  #spread(now, size) {
    this.#gaps.length -= this.#batch.size;
    for (let index = 0; index < size; index += 1) this.#gaps.push((now - this.#batch.from) / 1000 / size);
    this.#batch.size = size;
  }

  get ttft() {
    return this.#first === null ? null : (this.#first - this.#started) / 1000;
  }

  // How long nothing has come, in seconds; null before the first token.
  get silence() {
    return this.#last === null ? null : (performance.now() - this.#last) / 1000;
  }

  // A call's arguments come in one piece: then there is no time between tokens to be seen.
  draw(usage = null) {
    const output = usage ? usage.completion_tokens : this.#num;
    const isSeen = output <= 2 * this.#num;
    const span = this.#first === null ? 0 : (this.#last - this.#first) / 1000;
    const recent = this.#gaps.length > 4000 ? this.#gaps.slice(-4000) : this.#gaps;
    this.#set("First token", seconds(this.ttft));
    this.#set("Between p50", seconds(isSeen ? percentile(recent, 0.5) : null));
    this.#set("Between p99", seconds(isSeen ? percentile(recent, 0.99) : null));
    this.#set("Tokens/s", isSeen && span > 0 && output > 1 ? count((output - 1) / span) : "–");
    this.#set("Tokens", count(output));
    if (!usage) return;
    const cached = usage.prompt_tokens_details?.cached_tokens;
    this.#set("Cached", `${count(cached)} of ${count(usage.prompt_tokens)}`);
  }

  // Drops what stayed unknown. `info`: the gateway's details beside OpenAI's fields.
  end(requestId, info, moves) {
    for (const cell of Object.values(this.#cells)) if (cell.textContent === "–") cell.parentElement.remove();
    const workers = info?.decode_worker && `${info.prefill_worker ? `prefill ${info.prefill_worker},` : "prefill and"} decode ${info.decode_worker}`;
    const parts = [this.seed, workers, requestId && timelineLink(requestId)].filter(Boolean);
    this.workers.replaceChildren(...parts.flatMap((part, index) => (index ? [" · ", part] : [part])));
    if (moves.length) this.workers.prepend(make("strong", { class: "survived" }, `This answer ${survived(moves)}`));
  }

  // Pairs of a name and a text.
  get shown() {
    return [...this.element.children].map((cell) => [...cell.children].map((each) => each.textContent));
  }

  show(figures) {
    this.element.replaceChildren(...figures.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))));
  }

  #set(name, text) {
    setText(this.#cells[name], text);
  }
}
