// The keys of this tab: of a link, of another tab of this page, or of the dialog, which checks them.

import { keyOf, request, storeKey } from "./api.js";
import { byId, setText } from "./dom.js";

const FIELDS = { tenant: "api-key", operator: "operator-token" };
const CHECKS = {
  tenant: ["/v1/models", "This API key is not valid."], operator: ["/v1/cluster", "This operator token is not valid."],
};
const WHO = Object.keys(FIELDS);
const tabs = new BroadcastChannel("hearth.keys");
const haveKeys = () => WHO.some(keyOf);

export function askForKeys(reason = "") {
  setText(byId("keys-error"), reason);
  if (byId("keys").open) return;
  for (const who of WHO) byId(FIELDS[who]).value = keyOf(who);
  byId("keys").showModal();
}

// The link of `hearth up` is `/#key=…&operator=…&model=…`: no server gets it, and it leaves the address
// at once. Returns null without such a link, else the model, which may be "".
export function takeLink() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (!given.has("key") && !given.has("operator")) return null;
  history.replaceState(null, "", location.pathname);
  byId("keys").close();
  storeKey("tenant", given.get("key"));
  storeKey("operator", given.get("operator"));
  return given.get("model") ?? "";
}

// A tab without keys, such as that of a link, gets those of another tab, if there is one.
export function borrowKeys(onLent) {
  tabs.onmessage = ({ data }) => {
    if (data === "keys?") {
      if (haveKeys()) tabs.postMessage(WHO.map(keyOf));
    } else if (!haveKeys()) {
      WHO.forEach((who, index) => storeKey(who, data[index]));
      byId("keys").close();
      onLent();
    }
  };
  if (!haveKeys()) tabs.postMessage("keys?");
}

export function setUpKeys(onChange) {
  byId("open-keys").addEventListener("click", () => askForKeys());
  byId("close-keys").addEventListener("click", () => byId("keys").close());
  byId("keys").addEventListener("close", () => byId(byId("play").hidden ? "main" : "prompt").focus());
  byId("keys-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const given = Object.fromEntries(WHO.map((who) => [who, byId(FIELDS[who]).value.trim()]));
    for (const who of WHO) if (given[who] && !await isValid(who, given[who])) return;
    for (const who of WHO) storeKey(who, given[who]);
    byId("keys").close();
    onChange();
  });
}

async function isValid(who, key) {
  const [path, reason] = CHECKS[who];
  try {
    await request(path, { who, key });
    return true;
  } catch (error) {
    setText(byId("keys-error"), [401, 404].includes(error.status) ? reason : error.message);
    byId(FIELDS[who]).focus();
    return false;
  }
}
