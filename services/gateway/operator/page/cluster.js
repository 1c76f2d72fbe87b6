// The cluster as it moves: a stream of deltas from the gateway, for holders of the operator token.

import { keyOf, readEvents, request } from "./api.js";
import { byId, setText } from "./dom.js";
import { addEvents, drawRejected } from "./events.js";
import { loadFaults } from "./faults.js";
import { Fleet } from "./fleet.js";
import { addSamples, drawHeadline } from "./headline.js";
import { drawModels } from "./models.js";
import { watchTenants } from "./tenants.js";

const RETRY_MS = 1000;

const fleet = new Fleet();
let processes = new Map();
let lists = {};
let reading = null; // AbortController

const status = (text) => setText(byId("cluster-status"), text);

export function showCluster() {
  if (reading) return;
  if (!keyOf("operator")) {
    byId("cluster-body").hidden = true;
    status("The cluster is for its operators: enter the operator token under Keys. `hearth up` prints it.");
    return;
  }
  reading = new AbortController();
  status("Connecting …");
  loadFaults(reading.signal);
  read(reading.signal);
  watchTenants(reading.signal);
}

export function hideCluster() {
  reading?.abort();
  reading = null;
}

async function read(signal) {
  while (!signal.aborted) {
    try {
      const response = await request("/v1/cluster/events", { who: "operator", signal });
      for await (const { event, data } of readEvents(response)) take(event, JSON.parse(data));
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 404) {
        byId("cluster-body").hidden = true;
        status("This operator token is not valid. Enter another one under Keys.");
        reading = null;
        return;
      }
    }
    if (signal.aborted) return;
    status("The gateway does not answer; trying again …");
    fleet.setStale(true);
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function take(event, data) {
  const isAll = event === "snapshot";
  if (isAll) {
    processes = new Map(Object.entries(data.processes));
    lists = data.lists;
    byId("cluster-body").hidden = false;
    fleet.setStale(false);
    status("");
  } else {
    for (const [id, fields] of Object.entries(data.changed ?? {})) merge(id, fields);
    for (const id of data.removed ?? []) processes.delete(id);
    lists = { ...lists, ...data.lists };
  }
  if (isAll || data.events) addEvents(data.events ?? [], isAll);
  if (isAll || data.samples) addSamples(data.samples ?? [], isAll);
  if (isAll || data.lists?.rejected) drawRejected(lists.rejected);
  if (isAll || data.samples) drawHeadline(lists.figures, processes);
  if (isAll || data.samples || data.lists) drawModels(lists, processes);
  fleet.draw(processes, new Map(lists.models.map((each) => [each.worker_id, each.wake_s])));
}

function merge(id, fields) {
  const merged = { ...processes.get(id) };
  for (const [name, value] of Object.entries(fields)) {
    if (value === null) delete merged[name];
    else merged[name] = value;
  }
  processes.set(id, merged);
}
