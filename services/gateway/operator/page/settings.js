// The settings form: checked fields of a chat request. A bad value is marked and nothing is sent.

import { store } from "./api.js";
import { byId, make, setText } from "./dom.js";

const NUMBERS = {
  temperature: [0, 2], top_p: [0, 1], top_k: [-1, 2147483647], min_p: [0, 1],
  max_tokens: [1, 2147483647], seed: [Number.MIN_SAFE_INTEGER, Number.MAX_SAFE_INTEGER],
};
const INTEGERS = new Set(["top_k", "max_tokens", "seed"]);
const DEFAULTS = { temperature: "model's", top_p: "model's", top_k: "model's", min_p: "model's", max_tokens: "1024" };
const LABELS = { temperature: "Temperature", top_p: "Top p", top_k: "Top k", min_p: "Min p", max_tokens: "Max tokens", seed: "Seed" };
const OF_SECOND = "-b"; // ends the ids of fields of the second column
const NUM_OTHERS = 3; // likeliest tokens beside the one that was sampled
const TOOLS_EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city.",
    parameters: {
      type: "object", properties: { city: { type: "string", enum: ["Lisbon", "Oslo"] } },
      required: ["city"], additionalProperties: false,
    },
  },
}];
const SCHEMA_EXAMPLE = {
  type: "object",
  properties: { topic: { type: "string", maxLength: 40 }, rating: { enum: [1, 2, 3] } },
  required: ["topic", "rating"], additionalProperties: false,
};

const PARAMS = { response_format: "schema", tool_choice: "tools", max_completion_tokens: "max_tokens", top_logprobs: "logprobs" };
const KEY = "hearth.settings";

export class BadSettings extends Error {}

export function setUpSettings() {
  for (const [name, text] of Object.entries(DEFAULTS)) byId(name).placeholder = text;
  byId("second-numbers").append(...Object.entries(LABELS).map(([name, text]) => (
    make("label", {}, text, make("input", { id: name + OF_SECOND, inputmode: "decimal", placeholder: "as above" })))));
  byId("compare").addEventListener("change", showSecond);
  const insert = (id, value) => () => {
    byId(id).value = JSON.stringify(value, null, 2);
    unmark(id);
  };
  byId("tools-example").addEventListener("click", insert("tools", TOOLS_EXAMPLE));
  byId("schema-example").addEventListener("click", insert("schema", SCHEMA_EXAMPLE));
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  byId("settings").addEventListener("input", (event) => unmark(event.target.id));
}

const showSecond = () => { byId("second").hidden = !byId("compare").checked; };
const fields = () => [...byId("settings").querySelectorAll("input, select, textarea"), byId("prompt")];
const valueOf = (field) => (field.type === "checkbox" ? "checked" : "value");

export const saveSettings = () => store(KEY, JSON.stringify(
  Object.fromEntries(fields().map((field) => [field.id, field[valueOf(field)]]).filter(([, value]) => value))));

export function restoreSettings() {
  const saved = JSON.parse(sessionStorage.getItem(KEY) || "{}");
  for (const field of fields()) {
    if (!(field.id in saved)) continue;
    if (field.matches("select:empty")) field.append(make("option", {}, saved[field.id])); // until models are listed
    field[valueOf(field)] = saved[field.id];
  }
  showSecond();
}

// Returns the settings of each column: the fields of a request beside its messages, and `system`.
// Throws BadSettings.
export function readColumns() {
  const first = readSettings();
  if (!byId("compare").checked) return [first];
  const own = { model: byId("model-b").value, system: byId("system-b").value.trim() };
  for (const name of Object.keys(own)) if (!own[name]) delete own[name];
  return [first, { ...first, ...own, ...readNumbers(OF_SECOND) }];
}

function readSettings() {
  const fields = { model: byId("model").value || undefined, system: byId("system").value, ...readNumbers() };
  if (byId("logprobs").checked) Object.assign(fields, { logprobs: true, top_logprobs: NUM_OTHERS });
  const stop = byId("stop").value;
  if (stop) fields.stop = stop;
  const tools = readJson("tools");
  if (tools !== undefined) {
    if (!Array.isArray(tools)) mark("tools", "Tools are a JSON array.");
    if (tools.length) fields.tools = tools;
  }
  const schema = readJson("schema");
  if (schema !== undefined) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  const extra = readJson("extra");
  if (extra !== undefined) {
    if (!extra || typeof extra !== "object" || Array.isArray(extra)) mark("extra", "This is a JSON object.");
    Object.assign(fields, extra);
  }
  return fields;
}

function readNumbers(suffix = "") {
  const fields = {};
  for (const [name, [low, high]] of Object.entries(NUMBERS)) {
    const text = byId(name + suffix).value.trim();
    if (!text) continue;
    const value = Number(text);
    const isWrong = !Number.isFinite(value) || value < low || value > high;
    if (isWrong || (INTEGERS.has(name) && !Number.isInteger(value))) {
      const kind = INTEGERS.has(name) ? "a whole number" : "a number";
      mark(name + suffix, `${name.replace("_", " ")} is ${kind} from ${low} to ${high}.`);
    }
    fields[name] = value;
  }
  return fields;
}

// The value of a box, or undefined if it is empty.
function readJson(id) {
  const text = byId(id).value;
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    const at = placeOf(error.message, text);
    const before = text.slice(0, at).split("\n");
    mark(id, `Line ${before.length}, column ${before.at(-1).length + 1}: ${error.message}`, at);
  }
}

// Engines name a position, or a line and a column, or only the end.
function placeOf(message, text) {
  const position = /position (\d+)/.exec(message);
  if (position) return Math.min(Number(position[1]), text.length);
  const place = /line (\d+) column (\d+)/.exec(message);
  if (!place) return text.length;
  const lines = text.split("\n").slice(0, Number(place[1]) - 1);
  return lines.reduce((sum, line) => sum + line.length + 1, Number(place[2]) - 1);
}

// Marks the field that the `param` of a rejected request names. Returns whether there is one.
export function markRejected(param, message, column) {
  const root = /^\w*/.exec(param)[0], name = PARAMS[root] ?? root;
  const isExtra = byId("extra").value.includes(`"${root}"`);
  const isSecond = column && byId(name + OF_SECOND)?.value;
  const id = isExtra ? "extra" : isSecond ? name + OF_SECOND : name;
  if (byId(id)?.form !== byId("settings")) return false;
  point(id, message);
  return true;
}

const errorOf = (id) => byId(`${id}-error`) ?? byId("sampling-error");

function mark(id, message, at = null) {
  point(id, message, at);
  throw new BadSettings(message);
}

function point(id, message, at = null) {
  byId("settings-fold").open = true;
  const field = byId(id);
  for (let fold = field.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  field.setAttribute("aria-invalid", "true");
  setText(errorOf(id), message);
  field.focus();
  if (at !== null) field.setSelectionRange(at, Math.min(at + 1, field.value.length));
}

function unmark(id) {
  const field = byId(id);
  if (!field?.hasAttribute("aria-invalid")) return;
  field.removeAttribute("aria-invalid");
  setText(errorOf(id), "");
}
