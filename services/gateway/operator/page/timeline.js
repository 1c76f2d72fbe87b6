// The timeline of one request as a waterfall: every phase a bar, every try a block of rows.

import { keyOf, request } from "./api.js";
import { byId, bytes, count, make, seconds, setText } from "./dom.js";
import { and, pauseText, survived } from "./moves.js";
import { timeOf, watchRequests } from "./requests.js";

const COLORS = {
  validate: 1, render: 1, tokenize: 1, submit: 1, queue: 2, placement: 2, reserve: 3, prefill_wait: 2,
  prefill: 4, kv_push: 5, first_token: 6, decode: 6, recovery: 7, client_stall: 2,
};
// What a phase waits for, where it is a part of a pause. `from`: the workers that had the request before.
const WAITS = {
  recovery: "to see that $ was lost", submit: "for a scheduler", queue: "for room on a worker", placement: "for the worker's reply",
  reserve: "for room in its KV cache", prefill_wait: "for a prefill worker", prefill: "for the prompt's KV",
  kv_push: "for KV on its way", first_token: "for its first token",
};
const LEGEND = [[1, "gateway"], [2, "waiting"], [3, "reserve"], [4, "prefill"], [5, "KV push"], [6, "decode"], [7, "loss"]];
const MIN_SHARE = 0.1; // of a pause, for a part that is named
const TICKS = 5;
const status = (text) => setText(byId("request-status"), text);
let wanted = null; // AbortController of the newest request

export function setUpTimeline() {
  byId("find-request").addEventListener("submit", (event) => {
    event.preventDefault();
    const id = byId("request-id").value.trim();
    const hash = id ? `#request/${encodeURIComponent(id)}` : "#request";
    if (location.hash === hash) showTimeline(id);
    else location.hash = hash;
  });
}

export const hideTimeline = () => wanted?.abort();

export async function showTimeline(id) {
  wanted?.abort();
  byId("request-id").value = id;
  byId("timeline").replaceChildren();
  byId("all-requests").hidden = !id;
  const holders = ["operator", "tenant"].filter(keyOf);
  if (!holders.length) return status("Enter an API key or the operator token under Keys.");
  wanted = new AbortController();
  status("Loading …");
  if (!id) return watchRequests(holders, wanted.signal);
  try {
    byId("timeline").replaceChildren(draw(await load(id, holders, wanted.signal)));
    status("");
  } catch (error) {
    if (error.name !== "AbortError") {
      status(error.status === 404 ? "This gateway does not know the request, or not any more." : error.message);
    }
  }
}

// The tenant of the request may read it, and the operator.
async function load(id, holders, signal) {
  const path = `/v1/requests/${encodeURIComponent(id)}/timeline`;
  for (const who of holders) {
    try {
      return await (await request(path, { who, signal })).json();
    } catch (error) {
      if (who === holders.at(-1) || ![401, 403, 404].includes(error.status)) throw error;
    }
  }
}

export function draw(timeline) {
  const tries = timeline.tries ?? [];
  const total = Math.max(timeline.duration_s, 1e-6, ...allPhases(timeline).map((each) => each.start_s + each.duration_s));
  const isOpen = tries.length < 2;
  const groups = group("Gateway", timeline.gateway_id, timeline.gateway_phases ?? [], total, isOpen);
  tries.forEach((each, index) => {
    const prefill = each.prefill_worker_id ? `, prefill ${each.prefill_worker_id}` : "";
    const note = `${each.worker_id || "not placed"}${prefill} · ${each.outcome.replaceAll("_", " ")}`;
    groups.push(...group(`Try ${each.number}`, note, each.phases ?? [], total, isOpen, (name) => waitOf(name, each, index > 0)));
  });
  const step = stepOf(total);
  const table = make("table", { class: "waterfall" },
    make("caption", { class: "hidden" }, "Phases of the request"),
    make("thead", {}, make("tr", {}, ...["Phase", "Process", "Duration"].map((name) => (
      make("th", { scope: "col" }, name))), make("th", { scope: "col" }, make("span", { class: "hidden" }, "From the arrival"), axis(step, total)))), ...groups);
  table.style.setProperty("--step", `${(100 * step / total).toFixed(4)}%`);
  return make("div", {}, headline(timeline), summary(timeline), make("div", { class: "panel scroll" }, table,
    make("p", { class: "legend hint", "aria-hidden": "true" }, ...LEGEND.map(([color, text]) => make("span", {}, make("span", { class: `dot c${color}` }), text)))));
}

// 1, 2 or 5 times a power of ten, so that at most TICKS fit.
function stepOf(total) {
  const power = 10 ** Math.floor(Math.log10(total / TICKS));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => total / each <= TICKS);
}

function axis(step, total) {
  const ticks = Array.from({ length: Math.floor(total / step + 1e-9) + 1 }, (_, index) => index * step);
  return make("div", { class: "axis", "aria-hidden": "true" }, ...ticks.map((at) => {
    const label = make("span", {}, tickLabel(at, step));
    label.style.left = `${(100 * at / total).toFixed(3)}%`;
    return label;
  }));
}

function tickLabel(at, step) {
  if (!at) return "0";
  return step >= 1 ? `${at.toFixed(0)} s` : step >= 0.1 ? `${at.toFixed(1)} s` : `${Number((at * 1000).toPrecision(3))} ms`;
}

// "recovery" ends a lost try, the others begin the next one.
function waitOf(name, { worker_id: worker, outcome, phases = [] }, isLater) {
  const text = name === "recovery" && outcome !== "worker_lost" ? "" : WAITS[name];
  const isPart = name === "recovery" ? phases.at(-1)?.name === name : isLater;
  return isPart && text ? text.replace("$", worker) : "";
}

function headline({ outcome, status: code = 200, tries = [] }) {
  const moves = tries.map((each) => each.move).filter(Boolean);
  const texts = [];
  if (moves.length) texts.push(make("h2", {}, `This answer ${survived(moves)}`));
  if (code === 499) texts.push(make("h2", {}, "Its client ended this request"));
  else if (code >= 400) texts.push(make("h2", { class: "error" }, `This request failed: ${outcome.replaceAll("_", " ")}`));
  for (const each of tries) if (each.move) texts.push(make("p", { class: "hint" }, pauseOf(each, tries)));
  return make("div", { class: "fate" }, ...texts);
}

// Of what a pause consists: from the last token of a try to the first one of `next`.
function pauseOf(next, tries) {
  const end = next.phases.find((phase) => phase.name === "decode")?.start_s ?? Infinity;
  const parts = new Map();
  tries.forEach((each, index) => {
    for (const { name, start_s: start, duration_s: spent } of each.phases ?? []) {
      const text = waitOf(name, each, index > 0);
      if (text && start >= end - next.move.pause_s - 1e-3 && start + spent <= end + 1e-3) parts.set(text, (parts.get(text) ?? 0) + spent);
    }
  });
  const named = [...parts].filter(([, spent]) => spent >= MIN_SHARE * next.move.pause_s);
  return `To ${next.move.worker} in ${pauseText(next.move.pause_s)}: ${and(named.map(([text, spent]) => `${seconds(spent)} ${text}`))}.`;
}

function allPhases(timeline) {
  return [...(timeline.gateway_phases ?? []), ...(timeline.tries ?? []).flatMap((each) => each.phases ?? [])];
}

function summary(timeline) {
  const isServed = Boolean(timeline.tries?.length);
  const facts = {
    Outcome: timeline.outcome.replaceAll("_", " "), Model: timeline.model, Duration: seconds(timeline.duration_s),
    "First token": timeline.ttft_s && seconds(timeline.ttft_s),
    Prompt: isServed && `${count(timeline.num_prompt_tokens ?? 0)} tokens, ${count(timeline.num_cached_tokens ?? 0)} cached`,
    Output: isServed && `${count(timeline.num_output_tokens ?? 0)} tokens`,
    Started: timeOf(timeline.started_at),
  };
  if (timeline.num_late_masks) facts["Late masks"] = count(timeline.num_late_masks);
  return make("dl", { class: "figures panel" }, ...Object.entries(facts).filter(([, value]) => value).map(([name, value]) => (
    make("div", {}, make("dt", {}, name), make("dd", {}, value)))));
}

// All phases in one row, and each in a row of its own below, if that is opened.
function group(title, note, phases, total, isOpen, wait = () => "") {
  const rows = make("tbody", { hidden: !isOpen }, ...phases.map((phase) => row(phase, total, wait(phase.name))));
  const toggle = make("button", { class: "quiet", "aria-expanded": isOpen, onclick: () => {
    rows.hidden = !rows.hidden;
    toggle.setAttribute("aria-expanded", !rows.hidden);
  } }, title);
  const head = make("tr", { class: "try" }, make("th", { scope: "rowgroup", colspan: "3" }, toggle, make("span", { class: "hint" }, ` ${note}`)),
    make("td", { class: "track" }, ...phases.map((phase) => bar(phase, total))));
  return [make("tbody", {}, head), rows];
}

function bar(phase, total) {
  const element = make("span", { class: `phase c${COLORS[phase.name] ?? 1}`, title: `${phase.name.replaceAll("_", " ")} ${seconds(phase.duration_s)}` });
  element.style.left = `${(100 * phase.start_s / total).toFixed(3)}%`;
  element.style.width = `max(2px, ${(100 * phase.duration_s / total).toFixed(3)}%)`;
  return element;
}

function row(phase, total, wait) {
  const details = [wait];
  if (phase.num_bytes) details.push(bytes(phase.num_bytes));
  if (phase.num_tokens) details.push(`${count(phase.num_tokens)} tokens`);
  if (phase.num_steps) details.push(`${count(phase.num_steps)} steps`);
  const from = make("span", { class: "hidden" }, `starts ${seconds(phase.start_s)} after the arrival`);
  return make("tr", {},
    make("th", { scope: "row" }, phase.name.replaceAll("_", " ")), make("td", { class: "who" }, phase.process_id),
    make("td", { class: "number" }, seconds(phase.duration_s), make("span", { class: "hint" }, ` ${details.filter(Boolean).join(", ")}`)),
    make("td", { class: "track" }, bar(phase, total), from));
}
