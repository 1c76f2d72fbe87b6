// Kills or freezes a worker that `hearth up` runs on this machine. Other gateways name none.

import { request } from "./api.js";
import { button, byId, make, setText } from "./dom.js";

const PATH = "/v1/cluster/faults";
let targets = new Set();
let freezeS = 0;

export async function loadFaults(signal) {
  try {
    const found = await (await request(PATH, { who: "operator", signal })).json();
    [targets, freezeS] = [new Set(found.worker_ids), found.freeze_s];
  } catch {
    targets = new Set();
  }
}

export const mayFail = (id) => targets.has(id);

export function faultControls(id) {
  const fold = make("details", { class: "fault" }, make("summary", {}, "Test its loss"));
  const fail = (fault, text) => button(text, () => inject(fold, id, fault));
  fold.append(make("div", { class: "row" }, fail("kill", `Kill ${id}`), fail("freeze", `Freeze ${id} for ${freezeS} s`)));
  return fold;
}

async function inject(fold, worker, fault) {
  fold.open = false;
  fold.querySelector("summary").focus();
  try {
    await request(PATH, { who: "operator", body: { worker_id: worker, fault } });
    say(fault === "kill" ? `${worker} was killed: it starts again.` : `${worker} is frozen for ${freezeS} s.`);
  } catch (error) {
    say(error.message);
  }
}

function say(text) {
  const status = byId("cluster-status");
  setText(status, text);
  setTimeout(() => status.textContent === text && setText(status, ""), 1000 * freezeS);
}
