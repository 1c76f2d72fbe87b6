// The settings form: checked fields of a chat request. A bad value is marked and nothing is sent.

import { byId, setText } from "./dom.js";

const NUMBERS = {
  temperature: [0, 2], top_p: [0, 1], top_k: [-1, 2147483647], min_p: [0, 1],
  max_tokens: [1, 2147483647], seed: [Number.MIN_SAFE_INTEGER, Number.MAX_SAFE_INTEGER],
};
const INTEGERS = new Set(["top_k", "max_tokens", "seed"]);
const DEFAULTS = { temperature: "model's", top_p: "model's", top_k: "model's", min_p: "model's", max_tokens: "1024" };
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

export class BadSettings extends Error {}

export function setUpSettings() {
  for (const [name, text] of Object.entries(DEFAULTS)) byId(name).placeholder = text;
  const insert = (id, value) => () => {
    byId(id).value = JSON.stringify(value, null, 2);
    unmark(id);
  };
  byId("tools-example").addEventListener("click", insert("tools", TOOLS_EXAMPLE));
  byId("schema-example").addEventListener("click", insert("schema", SCHEMA_EXAMPLE));
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  byId("settings").addEventListener("input", (event) => unmark(event.target.id));
}

// Returns the fields of the request beside its messages. Throws BadSettings.
export function readSettings() {
  const fields = { model: byId("model").value || undefined, ...readNumbers() };
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

function readNumbers() {
  const fields = {};
  for (const [name, [low, high]] of Object.entries(NUMBERS)) {
    const text = byId(name).value.trim();
    if (!text) continue;
    const value = Number(text);
    const isWrong = !Number.isFinite(value) || value < low || value > high;
    if (isWrong || (INTEGERS.has(name) && !Number.isInteger(value))) {
      const kind = INTEGERS.has(name) ? "a whole number" : "a number";
      mark(name, `${name.replace("_", " ")} is ${kind} from ${low} to ${high}.`, "sampling-error");
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
    mark(id, `Line ${before.length}, column ${before.at(-1).length + 1}: ${error.message}`, `${id}-error`, at);
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

function mark(id, message, errorId = `${id}-error`, at = null) {
  const field = byId(id);
  for (let fold = field.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  field.setAttribute("aria-invalid", "true");
  setText(byId(errorId), message);
  field.focus();
  if (at !== null) field.setSelectionRange(at, Math.min(at + 1, field.value.length));
  throw new BadSettings(message);
}

function unmark(id) {
  const field = byId(id);
  if (!field?.hasAttribute("aria-invalid")) return;
  field.removeAttribute("aria-invalid");
  setText(byId(id in NUMBERS ? "sampling-error" : `${id}-error`), "");
}
