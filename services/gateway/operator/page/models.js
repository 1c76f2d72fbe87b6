// Models with their state, hosts with their budgets, other sites, roles and their demand.

import { badge, byId, bytes, count, make, seconds, used } from "./dom.js";
import { device, since } from "./fleet.js";

const known = (value, text) => (value ? text(value) : "–");
const NAMES = { hot: "good", failed: "bad", served: "good", standby: "warn", connected: "good", cut: "bad" };

export function drawModels({ models, hosts, demands, links }, processes) {
  byId("sections").replaceChildren(...[
    section("Models", ["Model", "Revision", "State", "Where", "Weights", "KV cache", "Wakes in"],
      [...models.map(hosted), ...served(processes, models)]),
    section("Hosts", ["Host", "State", "Device", "Memory used", "Models"], hosts.flatMap(host)),
    section("Other sites", ["Site", "Region", "Link", "Round trip", "Sent", "Received", "Requests there", "From there", "Models"], links.map(link)),
    section("Roles", ["Model", "Role", "Workers", "Wanted", "Queued"], demands.map((each) => (
      [each.model, each.role, count(each.num_workers ?? 0), count(each.num_wanted_workers ?? 0), count(each.num_queued_requests ?? 0)]))),
  ].filter(Boolean));
}

function section(title, allHeads, allRows) {
  if (!allRows.length) return null;
  const isUsed = allHeads.map((_, index) => allRows.some((row) => row[index] !== "–"));
  const [heads, ...rows] = [allHeads, ...allRows].map((row) => row.filter((_, index) => isUsed[index]));
  return make("section", { class: "panel" }, make("h2", {}, title),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title} as a table` },
      make("table", {}, make("caption", { class: "hidden" }, title),
        make("thead", {}, make("tr", {}, ...heads.map((each) => make("th", { scope: "col" }, each)))),
        make("tbody", {}, ...rows.map(([first, ...rest]) => make("tr", {},
          make("th", { scope: "row", class: "who" }, first), ...rest.map((each) => make("td", {}, each))))))));
}

const state = (name) => badge(name, NAMES[name]);

function hosted(each) {
  const reason = each.failure ? make("p", { class: "error" }, each.failure) : null;
  const pinned = each.is_pinned ? " (pinned)" : "";
  return [each.name, each.revision.slice(0, 12), make("div", {}, state(each.state), pinned, reason), `${each.host_id}, ${each.device}`,
    known(each.weights_bytes, bytes), known(each.kv_bytes, bytes), known(each.state === "cold" ? each.start_s : each.wake_s, seconds)];
}

// Models of workers that no host runs.
function served(processes, models) {
  const ofHosts = new Set(models.map((each) => each.worker_id));
  const found = new Map();
  for (const [id, each] of processes) {
    if (!each.model || ofHosts.has(id)) continue;
    const key = `${each.model}\n${each.revision}`;
    found.set(key, [...(found.get(key) ?? []), each]);
  }
  return [...found.values()].map((all) => {
    const workers = all.length === 1 ? "1 worker" : `${all.length} workers`;
    const devices = [...new Set(all.map((each) => device(each)))].join(", ");
    const kv = all.reduce((sum, each) => sum + (each.kv_bytes ?? 0), 0);
    return [all[0].model, all[0].revision ?? "–", state("served"), `${workers}, ${devices}`, "–", known(kv, bytes), "–"];
  });
}

function host(each) {
  const states = Object.entries(each.models ?? {}).map(([name, num]) => `${count(num)} ${name}`).join(", ") || "none";
  return (each.devices ?? []).map((memory) => [each.process_id, state(each.state), memory.device, budget(memory), states]);
}

const budget = ({ used_bytes: num, budget_bytes: most }) => used(num / Math.max(1, most), `${bytes(num)} of ${bytes(most)}`);

function link({ is_cut: isCut, sent_per_s: sent = 0, received_per_s: received = 0, ...each }) {
  return [each.site, each.region ?? "–", make("div", {}, state(isCut ? "cut" : "connected"), ` for ${since(each.for_s ?? 0)}`),
    known(each.round_trip_s, seconds), `${bytes(sent)}/s`, `${bytes(received)}/s`, count(each.num_placed ?? 0), count(each.num_served ?? 0), (each.models ?? ["–"]).join(", ")];
}
