// Views by the address's fragment, and the keys of this tab.

import { keyOf, storeKey } from "./api.js";
import { hideCluster, showCluster } from "./cluster.js";
import { byId } from "./dom.js";
import { loadModels, setUpPlay } from "./play.js";
import { hideTimeline, setUpTimeline, showTimeline } from "./timeline.js";

const TITLES = { play: "Playground", cluster: "Cluster", request: "Timeline" };

function show() {
  const [name, id = ""] = location.hash.slice(1).split("/", 2);
  const view = name in TITLES ? name : "play";
  for (const each of Object.keys(TITLES)) {
    byId(each).hidden = each !== view;
    const link = document.querySelector(`[data-view=${each}]`);
    if (each === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${TITLES[view]} · Hearth`;
  if (view === "cluster") showCluster();
  else hideCluster();
  if (view === "request") showTimeline(decoded(id));
  else hideTimeline();
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function askForKeys() {
  if (byId("keys").open) return;
  byId("api-key").value = keyOf("tenant");
  byId("operator-token").value = keyOf("operator");
  byId("keys").showModal();
}

function setUpKeys() {
  byId("open-keys").addEventListener("click", askForKeys);
  byId("close-keys").addEventListener("click", () => byId("keys").close());
  byId("keys-form").addEventListener("submit", (event) => {
    event.preventDefault();
    storeKey("tenant", byId("api-key").value.trim());
    storeKey("operator", byId("operator-token").value.trim());
    byId("keys").close();
    hideCluster();
    loadModels();
    show();
  });
}

setUpKeys();
setUpPlay(askForKeys);
setUpTimeline();
addEventListener("hashchange", show);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment is the view
  byId("main").focus();
});
show();
loadModels();
if (!keyOf("tenant")) askForKeys();
