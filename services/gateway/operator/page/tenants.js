// What tenants used today and use of their limits now: read from time to time while it is shown.

import { request } from "./api.js";
import { byId, count, make, setText, used } from "./dom.js";

const READ_MS = 5000;
const LIMITS = {
  requests_per_min: "requests/min", input_tokens_per_min: "input tokens/min",
  output_tokens_per_min: "output tokens/min", concurrency: "open at once",
};
const AMOUNTS = ["requests", "input_tokens", "cached_tokens", "output_tokens", "num_open"];

export async function watchTenants(signal) {
  while (!signal.aborted) {
    try {
      draw(await (await request("/v1/cluster/tenants", { who: "operator", signal })).json());
    } catch (error) {
      if (signal.aborted) return;
      setText(byId("tenants-status"), error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, READ_MS));
  }
}

function draw({ is_current: isCurrent, day, num_tenants: num, tenants }) {
  const rest = num > tenants.length ? ` ${count(tenants.length)} of ${count(num)} tenants.` : "";
  const stale = isCurrent ? "" : "Redis is away: old figures. ";
  setText(byId("tenants-status"), `${stale}Used today (${day || "unknown"}, UTC).${rest}`);
  byId("tenants-body").replaceChildren(...tenants.map((each) => make("tr", {},
    make("th", { scope: "row", class: "who" }, each.tenant_id, make("p", { class: "hint" }, each.sites, each.refused && ` refused: ${each.refused}`)), ...AMOUNTS.map((name) => make("td", {}, count(each[name]))),
    make("td", {}, ...(each.limits.length ? each.limits.map(limit) : ["none"])))));
}

const limit = ({ name, used: num, limit: most }) =>
  used(most ? num / most : 1, `${count(num)} of ${count(most)} ${LIMITS[name] ?? name}`);
