// Losses, other events, and rejected requests: no client can push out a loss.

import { badge, byId, count, make } from "./dom.js";

const MAX_EVENTS = 50; // of each list
const CALM = new Set(["joined", "stopped", "role changed", "model added", "model removed", "model changed", "model woken", "model parked"]);
const GOOD = new Set(["joined", "returned", "model woken"]);
const STREAMS = new Map([["moved", "moved"], ["stream lost", "lost"]]);
const TIME = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };

let losses = [];
let others = [];

export function addEvents(events, isAll) {
  if (isAll) losses = others = [];
  losses = [...losses, ...events.filter((each) => !CALM.has(each.kind))].slice(-MAX_EVENTS);
  others = [...others, ...events.filter((each) => CALM.has(each.kind))].slice(-MAX_EVENTS);
  draw("losses", losses);
  draw("events", others);
}

// Of Unix seconds, in 24 hours; with its date unless it is today's.
export function time(at) {
  const date = new Date(at * 1000);
  const isToday = date.toDateString() === new Date().toDateString();
  const day = isToday ? "" : `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} `;
  return make("time", { datetime: date.toISOString() }, day + date.toLocaleTimeString("en-GB", TIME));
}

function draw(id, events) {
  const items = [...events].reverse().map((event) => make("li", {}, time(event.at), ...words(event)));
  byId(id).replaceChildren(...(items.length ? items : [make("li", { class: "hint" }, "None yet.")]));
}

function words({ kind, process_id: id, gateway_id: gateway = "", count: num = 1, detail = "" }) {
  const who = (text) => make("span", { class: "who" }, text);
  if (STREAMS.has(kind)) {
    const from = id !== gateway ? `from ${id}, ` : "";
    return [badge(`${count(num)} stream${num > 1 ? "s" : ""} ${STREAMS.get(kind)}`, kind === "moved" ? "warn" : "bad"), who(`${from}by ${gateway}`)];
  }
  const level = GOOD.has(kind) ? "good" : CALM.has(kind) ? "" : "bad";
  return [badge(num > 1 ? `${kind} × ${count(num)}` : kind, level), who(detail ? `${id}: ${detail}` : id)];
}

export function drawRejected(rows) {
  byId("rejected-panel").hidden = !rows.length;
  byId("rejected").replaceChildren(...rows.map((each) => make("li", {}, make("b", {}, `${count(each.count)} ×`),
    make("span", { class: "who" }, each.code.replaceAll("_", " ")), make("span", { class: "hint" }, `by ${each.gateway_id}, last `, time(each.at)))));
}
