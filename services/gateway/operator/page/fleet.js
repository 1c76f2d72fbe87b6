// Draws the fleet: totals, workers as tiles by region, a table.

import { byId, bytes, count, make, seconds, setText } from "./dom.js";
import { faultControls, mayFail } from "./faults.js";

// Not by colour alone: each state has its sign and its word.
const SIGNS = { ready: "●", starting: "◔", loading: "◔", compiling: "◔", draining: "◐", silent: "✕", gone: "✕", stuck: "‖", stopped: "■", standby: "○" };
const WORDS = { silent: "silent: frozen or cut off", gone: "gone: no connection", stuck: "stuck: makes no step" };
const LOST = new Set(["silent", "gone", "stuck", "stopped", "restarted", "doubled"]);
const NUM_PER_FRAME = 24; // tiles: no frame takes long, and a fleet of 200 is drawn within a second
const percent = (ratio) => `${Math.round(100 * ratio)} %`;
const text = (name) => (_, each) => each[name] ?? "";
const number = (name) => (_, each) => count(each[name]);
// Of a device whose peak is unknown: the rate.
const share = (ratio, rate, unit) => (_, each) => each[ratio] >= 0 ? percent(each[ratio])
  : each[rate] >= 0 ? `${bytes(each[rate]).replace("B", unit)}/s` : "";
const COLUMNS = {
  process: (id) => id,
  role: text("role"),
  region: text("region"),
  host: text("host"),
  state: text("state"),
  running: number("num_running"),
  waiting: (_, each) => count(each.num_waiting ?? each.num_queued_requests),
  "tokens/s": number("generated_per_s"),
  "prompt tokens/s": number("prefilled_per_s"),
  busy: share("busy_ratio"),
  bandwidth: share("bandwidth_ratio", "traffic_bytes_per_s", "B"),
  arithmetic: share("arithmetic_ratio", "operations_per_s", "FLOP"),
  streams: number("num_open_streams"),
};

const kvShare = (each) => 1 - (each.num_free_blocks ?? 0) / (each.num_total_blocks || 1);
// Of seconds.
export function since(age) {
  const [unit, length] = [["d", 86400], ["h", 3600], ["min", 60]].find(([, each]) => age >= each) ?? ["s", 1];
  return `${Math.floor(age / length)} ${unit}`;
}
// The first device features: cpu-avx512bf16.
export const device = (each) => (each.device ?? "").split("-", 2).join("-");
const isWorker = (each) => each.num_running !== undefined;
const isLost = (each) => LOST.has(each.state);

export class Fleet {
  #tiles = new Map();
  #groups = new Map();
  #waiting = new Map(); // workers whose tiles are to be drawn
  #frame = 0;

  setStale(isStale) {
    byId("cluster-body").classList.toggle("stale", isStale);
  }

  // `wakes`: by worker, the seconds from standby to ready.
  draw(processes, wakes) {
    this.#wakes = wakes;
    if (!byId("table-head").childElementCount) this.#setUp();
    setText(byId("totals"), totals([...processes.values()].filter((each) => !isLost(each))));
    for (const [id, each] of processes) if (isWorker(each)) this.#waiting.set(id, each);
    for (const id of this.#waiting.keys()) if (!processes.has(id)) this.#waiting.delete(id);
    for (const [id, tile] of this.#tiles) if (!processes.has(id)) this.#drop(id, tile);
    if (byId("as-table").open) drawTable(processes);
    this.#processes = processes;
    this.#drawSome();
  }

  // Some tiles a frame, lost workers first; all at once where no frames come.
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
  #wakes = new Map();

  #setUp() {
    byId("table-head").append(...Object.keys(COLUMNS).map((name) => make("th", { scope: "col" }, name)));
    byId("as-table").addEventListener("toggle", () => drawTable(this.#processes));
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
    drawTile(tile, each, this.#wakes.get(id));
    if (!tile.fault && mayFail(id)) tile.element.append(tile.fault = faultControls(id));
    if (tile.fault) tile.fault.hidden = isLost(each);
  }

  // Tiles of a role in a region.
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

// Of live processes.
function totals(live) {
  const num = (role) => live.filter((each) => each.role.split("+").includes(role)).length;
  const values = (field) => live.map((each) => each[field] ?? 0);
  const sum = (field) => count(values(field).reduce((total, each) => total + each, 0));
  const indices = live.flatMap((each) => each.index_state ?? []);
  const index = indices.every((each) => each === "exact") ? "exact" : "degraded";
  return joined(`${sum("num_open_streams")} open streams · gateways ${num("gateway")}`,
    `${sum("num_queued_requests")} queued, the oldest for ${Math.max(0, ...values("oldest_wait_s"))} s`,
    indices.length ? `index ${index}` : "no index", `${num("prefill")} prefill: ${sum("prefilled_per_s")} prompt tokens/s`,
    `${num("decode")} decode: ${sum("generated_per_s")} tokens/s, ${sum("num_handoffs_in_flight")} handoffs`);
}

function makeTile(id, place) {
  const tile = {
    place,
    state: make("span", { class: "state" }), facts: make("p", { class: "hint model" }),
    fill: make("span", { class: "fill" }), kv: make("span", {}), load: make("p"), step: make("p", { class: "step" }),
  };
  const bar = make("span", { class: "bar", "aria-hidden": "true" }, tile.fill);
  tile.memory = make("div", { class: "kv" }, make("span", {}, "KV"), bar, tile.kv);
  tile.element = make("li", { class: "panel tile" },
    make("header", {}, make("h3", { title: id }, id), tile.state), tile.facts, tile.memory, tile.load, tile.step);
  return tile;
}

const joined = (...parts) => parts.filter(Boolean).join(" · ");

function drawTile(tile, each, wakeS) {
  const share = kvShare(each);
  tile.element.className = `panel tile ${isLost(each) ? "lost" : each.state}`;
  setText(tile.state, `${SIGNS[each.state] ?? "◌"} ${WORDS[each.state] ?? each.state}`);
  setText(tile.facts, joined(each.model, device(each), each.host, each.release, each.started_at && `up ${since(Date.now() / 1000 - each.started_at)}`));
  tile.memory.hidden = !each.num_total_blocks; // in standby
  tile.fill.style.transform = `scaleX(${share.toFixed(3)})`;
  tile.fill.classList.toggle("full", share > 0.95);
  setText(tile.kv, percent(share) + (each.kv_bytes ? ` of ${bytes(each.kv_bytes)}` : ""));
  setText(tile.step, each.step_age_s ? `last step ${each.step_age_s} s ago` : "");
  setText(tile.load, each.state === "standby" ? `wakes in about ${wakeS ? seconds(wakeS) : "? s"}` : load(each));
}

function load(each) {
  const prefills = each.role.endsWith("prefill");
  const speed = isLost(each) ? 0 : (prefills ? each.prefilled_per_s : each.generated_per_s) ?? 0;
  return joined(`${count(each.num_running)} running`, `${count(each.num_waiting)} waiting`,
    `${count(speed)} ${prefills ? "prompt " : ""}tokens/s`,
    each.recent_hit_ratio >= 0 && `${percent(each.recent_hit_ratio)} hits`,
    each.num_encoded_images && `${count(each.num_encoded_images)} images`,
    each.num_handoffs_in_flight && `${count(each.num_handoffs_in_flight)} handoffs`,
    each.saved_kv_bytes && `${bytes(each.saved_kv_bytes)} KV saved`);
}

function drawTable(processes) {
  const rows = [...processes].map(([id, each]) => make("tr", {}, ...Object.values(COLUMNS).map((column, index) =>
    make(index ? "td" : "th", { scope: !index && "row" }, column(id, each)))));
  byId("table-body").replaceChildren(...rows);
}
