// Draws the fleet: totals along the way of a request, workers as tiles by region, events, a table.

import { byId, bytes, count, make, seconds, setText } from "./dom.js";
import { Sparkline } from "./sparkline.js";

// Not by colour alone: each state has its sign and its word.
const SIGNS = { ready: "●", starting: "◔", draining: "◐", silent: "✕", gone: "✕", stuck: "‖", stopped: "■", standby: "○" };
const WORDS = { silent: "silent: frozen or cut off", gone: "gone: no connection", stuck: "stuck: makes no step" };
const LOST = new Set(["silent", "gone", "stuck", "stopped", "restarted", "doubled"]);
const NUM_PER_FRAME = 24; // tiles: no frame takes long, and a fleet of 200 is drawn within a second
const FLOW = ["Gateways", "Schedulers", "Prefill", "Decode"];
const COLUMNS = {
  process: (id) => id,
  role: (_, each) => each.role,
  region: (_, each) => each.region ?? "",
  state: (_, each) => each.state,
  "last step": (_, each) => (each.num_running === undefined ? "" : `${each.step_age_s ?? "<1"} s ago`),
  running: (_, each) => count(each.num_running),
  waiting: (_, each) => count(each.num_waiting ?? each.num_queued_requests),
  "KV used": (_, each) => (each.num_total_blocks ? percent(kvShare(each)) : "–"),
  "tokens/s": (_, each) => count(each.generated_per_s),
  "prompt tokens/s": (_, each) => count(each.prefilled_per_s),
  "cache hits in 1 min": (_, each) => (each.recent_hit_ratio === undefined ? "–" : percent(each.recent_hit_ratio)),
  handoffs: (_, each) => count(each.num_handoffs_in_flight),
  "KV saved": (_, each) => (each.saved_kv_bytes === undefined ? "–" : bytes(each.saved_kv_bytes)),
  streams: (_, each) => count(each.num_open_streams),
};

const percent = (ratio) => `${Math.round(100 * ratio)} %`;
const kvShare = (each) => 1 - (each.num_free_blocks ?? 0) / Math.max(1, each.num_total_blocks ?? 1);
const isWorker = (each) => each.num_running !== undefined;
const isLost = (each) => LOST.has(each.state);

export class Fleet {
  #tiles = new Map();
  #groups = new Map();
  #flow = new Map();
  #waiting = new Map(); // workers whose tiles are to be drawn
  #frame = 0;

  setStale(isStale) {
    byId("cluster-body").classList.toggle("stale", isStale);
  }

  draw(processes, events, hasEvents) {
    if (!this.#flow.size) this.#setUp();
    this.#drawFlow([...processes.values()]);
    for (const [id, each] of processes) if (isWorker(each)) this.#waiting.set(id, each);
    for (const id of this.#waiting.keys()) if (!processes.has(id)) this.#waiting.delete(id);
    for (const [id, tile] of this.#tiles) if (!processes.has(id)) this.#drop(id, tile);
    if (hasEvents) drawEvents(events);
    if (byId("as-table").open) drawTable(processes);
    this.#processes = processes;
    this.#drawSome();
  }

  // Some tiles a frame, lost workers first; all at once where nobody looks, as there are no frames.
  #drawSome() {
    cancelAnimationFrame(this.#frame);
    const lost = [...this.#waiting].filter(([, each]) => isLost(each));
    const next = [...lost, ...this.#waiting].slice(0, document.hidden ? undefined : lost.length + NUM_PER_FRAME);
    for (const [id, each] of next) {
      if (this.#waiting.delete(id)) this.#drawWorker(id, each);
    }
    if (this.#waiting.size) this.#frame = requestAnimationFrame(() => this.#drawSome());
  }

  #processes = new Map();

  #setUp() {
    for (const name of FLOW) {
      const card = { value: make("b", {}, "–"), text: make("span", { class: "hint" }), canvas: make("canvas", { "aria-hidden": "true" }) };
      card.line = new Sparkline(card.canvas);
      card.element = make("li", { class: "panel stage" }, make("h2", {}, name), make("p", {}, card.value, " ", card.text), card.canvas);
      byId("flow").append(card.element);
      this.#flow.set(name, card);
    }
    byId("table-head").append(...Object.keys(COLUMNS).map((name) => make("th", { scope: "col" }, name)));
    byId("as-table").addEventListener("toggle", () => drawTable(this.#processes));
  }

  #drawFlow(all) {
    const live = all.filter((each) => !isLost(each));
    const of = (role) => live.filter((each) => each.role.split("+").includes(role));
    const sum = (found, field) => found.reduce((total, each) => total + (each[field] ?? 0), 0);
    const gateways = of("gateway"), schedulers = of("scheduler"), indices = of("kv_index");
    const streams = sum(gateways, "num_open_streams"), queued = sum(schedulers, "num_queued_requests");
    const oldest = Math.max(0, ...schedulers.map((each) => each.oldest_wait_s ?? 0));
    const exact = indices.length && indices.every((each) => each.index_state === "exact");
    const index = indices.length ? `index ${exact ? "exact" : "degraded"}` : "no index";
    const prompt = sum(of("prefill"), "prefilled_per_s"), generated = sum(of("decode"), "generated_per_s");
    const handoffs = sum(of("decode"), "num_handoffs_in_flight");
    this.#stage("Gateways", streams, `open streams, ${gateways.length} live`);
    this.#stage("Schedulers", queued, `queued${queued ? `, oldest ${seconds(oldest)}` : ""} · ${index}`);
    this.#stage("Prefill", prompt, `prompt tokens/s, ${of("prefill").length} live`);
    this.#stage("Decode", generated, `tokens/s, ${of("decode").length} live${handoffs ? `, ${count(handoffs)} handoffs` : ""}`);
  }

  #stage(name, value, text) {
    const card = this.#flow.get(name);
    setText(card.value, count(value));
    setText(card.text, text);
    card.element.classList.toggle("busy", value > 0);
    card.line.push(value);
  }

  #drawWorker(id, each) {
    const place = `${each.region ?? ""}\n${each.role}`;
    let tile = this.#tiles.get(id);
    if (tile && tile.place !== place) {
      this.#drop(id, tile);
      tile = null;
    }
    if (!tile) {
      tile = makeTile(id, place);
      this.#tiles.set(id, tile);
      this.#group(each).append(tile.element);
    }
    drawTile(tile, each);
  }

  // The list of the tiles of a role in a region.
  #group({ region = "", role }) {
    const place = `${region}\n${role}`;
    if (this.#groups.has(place)) return this.#groups.get(place);
    const title = [region, role.replaceAll("+", " and ")].filter(Boolean).join(" · ");
    const list = make("ul", { class: "tiles" });
    const group = make("section", { class: "group", "aria-label": title }, make("h2", {}, title), list);
    const before = [...byId("regions").children].find((other) => other.getAttribute("aria-label") > title);
    byId("regions").insertBefore(group, before ?? null);
    this.#groups.set(place, list);
    return list;
  }

  #drop(id, tile) {
    const list = tile.element.parentElement;
    tile.element.remove();
    this.#tiles.delete(id);
    if (list.childElementCount) return;
    list.parentElement.remove();
    this.#groups.delete(tile.place);
  }
}

function makeTile(id, place) {
  const tile = {
    place,
    state: make("span", { class: "state" }),
    model: make("span", { class: "hint model" }),
    fill: make("span", { class: "fill" }),
    kv: make("span", {}),
    running: make("b"), waiting: make("b"), speed: make("b"), unit: make("span"),
    step: make("p", { class: "step" }),
    canvas: make("canvas", { "aria-hidden": "true" }),
  };
  const bar = make("span", { class: "bar", "aria-hidden": "true" }, tile.fill);
  tile.line = new Sparkline(tile.canvas);
  tile.element = make("li", { class: "panel tile" },
    make("header", {}, make("h3", { title: id }, id), tile.state), tile.model,
    make("div", { class: "kv" }, make("span", {}, "KV "), bar, tile.kv),
    make("p", {}, tile.running, " running ", tile.waiting, " waiting"), tile.step,
    tile.canvas, make("p", {}, tile.speed, " ", tile.unit));
  return tile;
}

function drawTile(tile, each) {
  const share = kvShare(each);
  const prefills = each.role === "prefill";
  const speed = (prefills ? each.prefilled_per_s : each.generated_per_s) ?? 0;
  const saved = each.saved_kv_bytes ? `, ${bytes(each.saved_kv_bytes)} KV saved` : "";
  const hits = each.recent_hit_ratio === undefined ? "" : `, ${percent(each.recent_hit_ratio)} hits`;
  const handoffs = each.num_handoffs_in_flight ? `, ${count(each.num_handoffs_in_flight)} handoffs` : "";
  tile.element.className = `panel tile ${isLost(each) ? "lost" : each.state}`;
  setText(tile.state, `${SIGNS[each.state] ?? "◌"} ${WORDS[each.state] ?? each.state}`);
  setText(tile.model, each.model ?? "");
  tile.fill.style.transform = `scaleX(${share.toFixed(3)})`;
  tile.fill.classList.toggle("full", share > 0.95);
  setText(tile.kv, percent(share));
  setText(tile.step, each.step_age_s ? `last step ${each.step_age_s} s ago` : "");
  setText(tile.running, count(each.num_running));
  setText(tile.waiting, count(each.num_waiting));
  setText(tile.speed, count(isLost(each) ? 0 : speed));
  setText(tile.unit, `${prefills ? "prompt tokens/s" : "tokens/s"}${hits}${handoffs}${saved}`);
  tile.line.push(isLost(each) ? 0 : speed);
}

function drawEvents(events) {
  const items = [...events].reverse().map((event) => {
    const at = new Date(event.at * 1000);
    const times = event.count > 1 ? ` × ${count(event.count)}` : "";
    const kind = ["joined", "returned"].includes(event.kind) ? "good" : "bad";
    return make("li", {}, make("time", { datetime: at.toISOString() }, at.toLocaleTimeString()),
      make("span", { class: `badge ${kind}` }, event.kind + times), make("span", { class: "who" }, event.process_id));
  });
  byId("events").replaceChildren(...items);
}

function drawTable(processes) {
  const rows = [...processes].map(([id, each]) => make("tr", {}, ...Object.values(COLUMNS).map((text, index) => (
    index ? make("td", {}, text(id, each)) : make("th", { scope: "row" }, text(id, each))))));
  byId("table-body").replaceChildren(...rows);
}
