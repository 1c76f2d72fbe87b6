// One request's story as a waterfall: every phase a bar, every try a block of rows.

import { keyOf, request } from "./api.js";
import { byId, bytes, count, make, seconds, setText } from "./dom.js";

const COLORS = {
  validate: 1, render: 1, tokenize: 1, submit: 1, queue: 2, placement: 2, reserve: 3, prefill_wait: 2,
  prefill: 4, kv_push: 5, first_token: 6, decode: 6, recovery: 7, client_stall: 7,
};
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

export async function showTimeline(id) {
  wanted?.abort();
  byId("request-id").value = id;
  byId("timeline").replaceChildren();
  if (!id) return status("Enter the id of a request: it is beside each answer, and in x-request-id.");
  wanted = new AbortController();
  status("Loading …");
  try {
    byId("timeline").replaceChildren(draw(await load(id, wanted.signal)));
    status("");
  } catch (error) {
    if (error.name !== "AbortError") {
      status(error.status === 404 ? "This gateway does not know the request, or not any more." : error.message);
    }
  }
}

// The tenant of the request may read it, and the operator.
async function load(id, signal) {
  const path = `/v1/requests/${encodeURIComponent(id)}/timeline`;
  const holders = ["tenant", "operator"].filter(keyOf);
  if (!holders.length) throw new Error("Enter an API key or the operator token under Keys.");
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
  const body = make("tbody");
  addRows(body, "Gateway", timeline.gateway_id, timeline.gateway_phases ?? [], total);
  for (const each of tries) {
    const prefill = each.prefill_worker_id ? `, prefill ${each.prefill_worker_id}` : "";
    const note = `${each.worker_id || "not placed"}${prefill} · ${each.outcome}`;
    addRows(body, `Try ${each.number}`, note, each.phases ?? [], total);
  }
  const table = make("table", { class: "waterfall" },
    make("caption", { class: "hidden" }, "Phases of the request"),
    make("thead", {}, make("tr", {}, ...["Phase", "Process", "Duration", "From the arrival"].map((name) => (
      make("th", { scope: "col" }, name))))), body);
  return make("div", {}, summary(timeline), make("div", { class: "panel scroll" }, table));
}

function allPhases(timeline) {
  return [...(timeline.gateway_phases ?? []), ...(timeline.tries ?? []).flatMap((each) => each.phases ?? [])];
}

function summary(timeline) {
  const facts = {
    Outcome: timeline.outcome, Model: timeline.model, Duration: seconds(timeline.duration_s),
    "First token": seconds(timeline.ttft_s ?? null),
    Prompt: `${count(timeline.num_prompt_tokens ?? 0)} tokens, ${count(timeline.num_cached_tokens ?? 0)} cached`,
    Output: `${count(timeline.num_output_tokens ?? 0)} tokens`,
    Resubmissions: count(Math.max(0, (timeline.tries ?? []).length - 1)),
    Started: new Date(timeline.started_at * 1000).toLocaleTimeString(),
  };
  if (timeline.num_late_masks) facts["Late masks"] = count(timeline.num_late_masks);
  return make("dl", { class: "figures panel" }, ...Object.entries(facts).map(([name, value]) => (
    make("div", {}, make("dt", {}, name), make("dd", {}, value)))));
}

function addRows(body, title, note, phases, total) {
  body.append(make("tr", { class: "try" },
    make("th", { scope: "rowgroup", colspan: "4" }, title, make("span", { class: "hint" }, ` ${note}`))));
  for (const phase of phases) body.append(row(phase, total));
}

function row(phase, total) {
  const bar = make("span", { class: `phase c${COLORS[phase.name] ?? 1}` });
  bar.style.left = `${(100 * phase.start_s / total).toFixed(3)}%`;
  bar.style.width = `max(2px, ${(100 * phase.duration_s / total).toFixed(3)}%)`;
  const details = [];
  if (phase.num_bytes) details.push(bytes(phase.num_bytes));
  if (phase.num_tokens) details.push(`${count(phase.num_tokens)} tokens`);
  if (phase.num_steps) details.push(`${count(phase.num_steps)} steps`);
  const from = make("span", { class: "hidden" }, `starts ${seconds(phase.start_s)} after the arrival`);
  return make("tr", {},
    make("th", { scope: "row" }, phase.name.replaceAll("_", " ")), make("td", { class: "who" }, phase.process_id),
    make("td", { class: "number" }, seconds(phase.duration_s), make("span", { class: "hint" }, details.length ? ` ${details.join(", ")}` : "")),
    make("td", { class: "track" }, bar, from));
}
