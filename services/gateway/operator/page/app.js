// Views by the address's fragment.

import { keyOf } from "./api.js";
import { hideCluster, showCluster } from "./cluster.js";
import { byId } from "./dom.js";
import { askForKeys, borrowKeys, setUpKeys, takeLink } from "./keys.js";
import { loadModels, setUpPlay } from "./play.js";
import { hideTimeline, setUpTimeline, showTimeline } from "./timeline.js";

// For another tab to lend its keys.
const LEND_MS = 150;
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

// With other keys.
function reload(model = "") {
  hideCluster();
  loadModels(model);
  show();
}

function start() {
  const model = takeLink() ?? "";
  show();
  borrowKeys(reload);
  loadModels(model);
  setTimeout(() => {
    const isEnough = keyOf("tenant") || (keyOf("operator") && byId("play").hidden);
    if (!isEnough) askForKeys();
  }, LEND_MS);
}

setUpKeys(reload);
setUpPlay();
setUpTimeline();
addEventListener("hashchange", () => {
  const model = takeLink();
  if (model === null) show();
  else reload(model);
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment is the view
  byId("main").focus();
});
start();
