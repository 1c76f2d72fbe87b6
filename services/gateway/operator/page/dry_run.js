// How much of a prompt the workers' caches hold, without running it.

import { request } from "./api.js";
import { byId, count, make } from "./dom.js";

// Throws ApiError. `body`: of the request that Send would make.
export async function dryRun(body) {
  const { request: found } = await (await request("/v1/prefixes/dry_run", { body: { request: body } })).json();
  byId("dry-run").replaceChildren(draw(found));
}

export const clearDryRun = () => byId("dry-run").replaceChildren();

function draw({ prompt_tokens: num, cached_tokens: cached, public_tokens: shared, index_state: state, workers }) {
  const holders = workers.slice(0, 4).map((each) => `${count(each.cached_tokens)} on ${each.worker}`).join(", ");
  const facts = [
    `${count(cached)} of ${count(num)} prompt tokens are cached, ${count(num - cached)} are not.`,
    holders && `${holders}${workers.length > 4 ? `, ${count(workers.length - 4)} more` : ""}.`,
    shared && `${count(shared)} of a public prefix.`, state !== "exact" && `The index is ${state}.`,
  ];
  const fill = make("span", { class: "fill" });
  fill.style.transform = `scaleX(${(cached / Math.max(1, num)).toFixed(3)})`;
  return make("div", { class: "panel dry-run" }, make("strong", {}, "Dry run"),
    make("span", { class: "bar", "aria-hidden": "true" }, fill), make("p", { class: "hint" }, facts.filter(Boolean).join(" ")));
}
