// The live figures of one answer, from the arrival of its chunks and from the usage at its end.

import { count, make, percentile, seconds, setText } from "./dom.js";

const MIN_GAP_MS = 0.5;
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
    this.seed = seed === undefined ? "" : `seed ${seed} · `;
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

  draw(usage = null) {
    const output = usage ? usage.completion_tokens : this.#num;
    const span = this.#first === null ? 0 : (this.#last - this.#first) / 1000;
    const recent = this.#gaps.length > 4000 ? this.#gaps.slice(-4000) : this.#gaps;
    this.#set("First token", seconds(this.ttft));
    this.#set("Between p50", seconds(percentile(recent, 0.5)));
    this.#set("Between p99", seconds(percentile(recent, 0.99)));
    this.#set("Tokens/s", span > 0 && output > 1 ? count((output - 1) / span) : "–");
    this.#set("Tokens", count(output));
    if (!usage) return;
    const cached = usage.prompt_tokens_details?.cached_tokens;
    this.#set("Cached", `${count(cached)} of ${count(usage.prompt_tokens)}`);
  }

  // `info`: the gateway's details beside OpenAI's fields.
  drawWorkers(info) {
    const prefill = info.prefill_worker ? `prefill ${info.prefill_worker}` : "prefill by decode";
    const moves = info.num_resubmissions ? `, resubmitted ${info.num_resubmissions}×` : "";
    const link = make("a", { href: `#request/${encodeURIComponent(info.request_id)}` }, "timeline");
    this.workers.replaceChildren(`${this.seed}${prefill}, decode ${info.decode_worker ?? "–"}${moves} · `, link);
  }

  #set(name, text) {
    setText(this.#cells[name], text);
  }
}
