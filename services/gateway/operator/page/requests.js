// The last requests that the gateway served: of all for the operator, else of the key's tenant.

import { request } from "./api.js";
import { badge, byId, count, make, seconds, setText } from "./dom.js";

const READ_MS = 5000;
const COLUMNS = ["Started", "Request", "Model", "Tokens", "Duration", "Outcome", "Moved"];

// `holders`: whose keys are there, the operator's first.
export async function watchRequests(holders, signal) {
  while (!signal.aborted) {
    try {
      const who = holders[0];
      const { requests } = await (await request("/v1/requests", { who, signal })).json();
      setText(byId("request-status"), requests.length ? "" : "No request has ended yet: ask something in the playground.");
      byId("timeline").replaceChildren(...(requests.length ? [draw(requests, who === "operator")] : []));
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 && holders.length > 1) {
        holders = holders.slice(1);
        continue;
      }
      setText(byId("request-status"), error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, READ_MS));
  }
}

function draw(requests, hasTenants) {
  const names = hasTenants ? [...COLUMNS, "Tenant"] : COLUMNS;
  const title = `The last requests of this gateway${hasTenants ? ", of all tenants" : ""}`;
  return make("div", { class: "panel scroll", tabindex: "0", role: "region", "aria-label": title },
    make("table", { class: "requests" }, make("caption", {}, title),
      make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...requests.map((each) => row(each, hasTenants)))));
}

function row(each, hasTenants) {
  const isBad = (each.status ?? 200) >= 400 && each.status !== 499;
  const tokens = each.model ? `${count(each.num_prompt_tokens ?? 0)} → ${count(each.num_output_tokens ?? 0)}` : "–";
  const moves = each.num_resubmissions ?? 0;
  return make("tr", {}, make("td", {}, make("time", {}, timeOf(each.started_at))),
    make("th", { scope: "row" }, make("a", { class: "code", href: `#request/${encodeURIComponent(each.request_id)}` }, each.request_id)),
    make("td", { class: "model" }, each.model || "–"), make("td", { class: "number" }, tokens), make("td", { class: "number" }, seconds(each.duration_s)),
    make("td", {}, badge(each.outcome.replaceAll("_", " "), isBad ? "bad" : "")),
    make("td", {}, moves ? badge(`${moves}×`, "moved") : ""),
    hasTenants ? make("td", { class: "who" }, each.tenant_id) : null);
}

export function timeOf(unix) {
  const date = new Date(unix * 1000);
  const isToday = date.toDateString() === new Date().toDateString();
  return date.toLocaleString("en-GB", { timeStyle: "medium", ...(isToday ? {} : { dateStyle: "medium" }) });
}
