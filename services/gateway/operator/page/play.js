// The playground: a conversation of this tab. Nothing is sent but by Send.

import { ApiError, idOf, keyOf, readEvents, request } from "./api.js";
import { Answer } from "./answer.js";
import { byId, make, setText } from "./dom.js";
import { clearDryRun, dryRun } from "./dry_run.js";
import { BadSettings, readColumns, setUpSettings } from "./settings.js";
import { asCurl, asJavaScript, asPython } from "./snippets.js";

const NAMES = ["Answer A", "Answer B"];
let turns = []; // {messages, element}; messages: one for all columns, or one for each
let running = null; // the AbortController of the answers that stream
let countdown = 0;

const status = (text) => setText(byId("play-status"), text);

export function setUpPlay(askForKeys) {
  setUpSettings();
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(askForKeys);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(askForKeys);
    }
  });
  byId("stop-answer").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    truncate(0);
    byId("prompt").focus();
  });
  byId("copy-curl").addEventListener("click", () => copy(asCurl, "curl"));
  byId("copy-python").addEventListener("click", () => copy(asPython, "Python"));
  byId("copy-javascript").addEventListener("click", () => copy(asJavaScript, "JavaScript"));
  byId("try-run").addEventListener("click", () => tryRun(askForKeys));
  if (matchMedia("(max-width: 900px)").matches) byId("settings-fold").open = false;
}

export async function loadModels() {
  if (!keyOf("tenant")) return status("Enter an API key under Keys to begin.");
  try {
    const { data } = await (await request("/v1/models")).json();
    list(byId("model"), data.map(({ id }) => make("option", { value: id }, id)));
    list(byId("model-b"), [make("option", { value: "" }, "As above"), ...data.map(({ id }) => make("option", { value: id }, id))]);
    status("");
  } catch (error) {
    show(error);
  }
}

function list(select, options) {
  const chosen = select.value;
  select.replaceChildren(...options);
  if (options.some(({ value }) => value === chosen)) select.value = chosen;
}

function send(askForKeys) {
  const text = byId("prompt").value;
  if (running || (!text.trim() && turns.at(-1)?.messages.find(Boolean).role !== "tool")) return;
  if (!keyOf("tenant")) return askForKeys();
  const columns = settingsOrNull();
  if (!columns) return;
  if (text.trim()) addUser(text);
  byId("prompt").value = "";
  stream(columns.map((fields, column) => bodyOf(withSeed(fields, columns), column)), askForKeys);
}

// Columns without a seed of their own share a random one: an answer can be repeated.
function withSeed(fields, columns) {
  columns.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  return { ...fields, seed: fields.seed ?? columns.seed };
}

function settingsOrNull() {
  try {
    return readColumns();
  } catch (error) {
    if (!(error instanceof BadSettings)) throw error;
    byId("settings-fold").open = true;
    status("Nothing was sent: a setting is not valid.");
    return null;
  }
}

function bodyOf({ model, system, ...others }, column = 0) {
  const messages = messagesOf(column);
  if (system.trim()) messages.unshift({ role: "system", content: system });
  return { model, messages, stream: true, stream_options: { include_usage: true }, ...others };
}

// A question whose answer failed is left out: many templates demand that roles alternate.
function messagesOf(column) {
  const messages = [];
  for (const { messages: all } of turns) {
    const message = all.length > 1 ? all[column] : all[0];
    if (message?.role === "user" && messages.at(-1)?.role === "user") messages.pop();
    if (message) messages.push(message);
  }
  return messages;
}

function addUser(text) {
  const edit = make("button", { type: "button", class: "quiet", onclick: () => rerunFrom(element) }, "Edit");
  const element = make("article", { class: "turn user", "aria-label": "You" },
    make("header", {}, make("strong", {}, "You"), edit), make("div", { class: "plain" }, text));
  add({ messages: [{ role: "user", content: text }], element });
}

function add(turn) {
  turns.push(turn);
  byId("turns").append(turn.element);
  turn.element.scrollIntoView({ block: "end" });
}

// Puts a turn into the composer, above what is written there, and drops it with all that followed.
function rerunFrom(element) {
  running?.abort();
  const index = turns.findIndex((turn) => turn.element === element);
  byId("prompt").value = [turns[index].messages[0].content, byId("prompt").value].filter(Boolean).join("\n");
  truncate(index);
  byId("prompt").focus();
}

// Drops an answer without a word, and its question, which can be sent again.
function takeBack(turn) {
  truncate(turns.indexOf(turn));
  const asked = turns.at(-1);
  if (asked?.messages[0]?.role === "user") rerunFrom(asked.element);
}

function truncate(length) {
  for (const { element } of turns.splice(length)) element.remove();
}

// `bodies`: of each column; null: that column waits.
async function stream(bodies, askForKeys) {
  const isPair = bodies.length > 1;
  const answers = bodies.map((body, column) => body && new Answer(
    body, isPair ? NAMES[column] : "Answer", isPair ? unlike(body, bodies[1 - column]) : ""));
  const elements = answers.filter(Boolean).map(({ element }) => element);
  const turn = { messages: [], element: isPair ? make("div", { class: "pair" }, ...elements) : elements[0] };
  const read = () => { turn.messages = answers.map((answer) => answer?.message); };
  const controller = new AbortController();
  read();
  add(turn);
  begin(controller);
  const areEmpty = await Promise.all(answers.map((answer, column) => (
    !answer || fill(answer, bodies[column], controller.signal, askForKeys))));
  finish(controller);
  read();
  if (!turns.includes(turn)) return;
  if (areEmpty.every(Boolean)) takeBack(turn);
  else answers.forEach((answer, column) => answer?.calls.length && offerResults(answer, column, turn, askForKeys));
}

// Returns whether the answer ended before its first word.
async function fill(answer, body, signal, askForKeys) {
  let note = "";
  try {
    const response = await request("/v1/chat/completions", { body, signal, headers: { "x-hearth-moves": "1" } });
    answer.requestId = idOf(response);
    note = await receive(response, answer);
  } catch (error) {
    note = error.name === "AbortError" ? "stopped" : "failed";
    if (note === "failed") show(error, askForKeys);
  }
  answer.end(note, Boolean(body.response_format));
  return ["stopped", "failed"].includes(note) && !answer.message && !answer.reasoning;
}

// The settings in which a column differs from the other.
function unlike(body, other) {
  const differs = (name) => name !== "messages" && JSON.stringify(body[name]) !== JSON.stringify(other?.[name]);
  const names = other ? Object.keys({ ...body, ...other }).filter(differs) : [];
  return names.map((name) => `${name.replaceAll("_", " ")} ${body[name] ?? "default"}`).join(", ");
}

async function receive(response, answer) {
  let reason = "";
  for await (const { event, data } of readEvents(response)) {
    if (event === "moved") {
      answer.moved(JSON.parse(data));
      continue;
    }
    if (data === "[DONE]") return reason === "length" ? "cut at max tokens" : "";
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, 200);
    reason = chunk.choices?.[0]?.finish_reason ?? reason;
    answer.take(chunk);
  }
  throw new ApiError("The answer broke off.", 0);
}

function begin(controller) {
  running = controller;
  clearInterval(countdown);
  status("");
  clearDryRun();
  byId("send").disabled = true;
  byId("stop-answer").hidden = false;
}

function finish(controller) {
  if (running !== controller) return;
  if (document.activeElement === byId("stop-answer")) byId("prompt").focus();
  running = null;
  byId("send").disabled = false;
  byId("stop-answer").hidden = true;
}

// Results of calls are typed by hand.
function offerResults(answer, column, turn, askForKeys) {
  const inputs = answer.calls.map((call) => (
    make("input", { placeholder: `Result of ${call.name}`, "aria-label": `Result of ${call.name}` })));
  const form = make("form", { class: "results", onsubmit: (event) => {
    event.preventDefault();
    if (running) return;
    const columns = settingsOrNull();
    if (!columns) return;
    form.remove();
    const inColumn = (value) => (turn.messages.length > 1 ? NAMES.map((_, each) => (each === column ? value : null)) : [value]);
    answer.calls.forEach((call, index) => addResult(call, inputs[index].value, inColumn));
    stream(inColumn(bodyOf(withSeed(columns[column] ?? columns[0], columns), column)), askForKeys);
  } }, ...inputs, make("button", { type: "submit", class: "main" }, "Send results"));
  answer.callList.append(form);
  answer.element.scrollIntoView({ block: "end" });
}

function addResult(call, text, inColumn) {
  const element = make("article", { class: "turn tool", "aria-label": `Result of ${call.name}` },
    make("header", {}, make("strong", {}, `Result of ${call.name}`)), make("div", { class: "plain" }, text));
  add({ messages: inColumn({ role: "tool", tool_call_id: call.id, content: text }), element });
}

function show(error, askForKeys = () => {}) {
  if (!(error instanceof ApiError)) console.error(error);
  if (error.status === 401) {
    status("This API key is not valid. Enter another one under Keys.");
    askForKeys();
  } else if (error.status === 429 && error.retryAfter) {
    countDown(error.message, error.retryAfter);
  } else {
    status(error.message);
  }
}

function countDown(message, left) {
  clearInterval(countdown);
  const draw = () => status(left > 0 ? `${message} Try again in ${left} s.` : "You can try again now.");
  draw();
  countdown = setInterval(() => {
    left -= 1;
    draw();
    if (left <= 0) clearInterval(countdown);
  }, 1000);
}

// What Send would send of the first column; null if a setting is not valid.
function draftBody() {
  const columns = settingsOrNull();
  if (!columns) return null;
  const body = bodyOf(columns[0]);
  const draft = byId("prompt").value.trim();
  if (draft) body.messages.push({ role: "user", content: draft });
  return body;
}

async function tryRun(askForKeys) {
  const body = draftBody();
  if (!body) return;
  if (!body.messages.length) return status("Write a message first.");
  try {
    await dryRun(body);
    status("");
  } catch (error) {
    show(error, askForKeys);
  }
}

async function copy(write, name) {
  const body = draftBody();
  if (!body) return;
  try {
    await navigator.clipboard.writeText(write(body));
    setText(byId("copied"), `Copied as ${name}; the key is $HEARTH_API_KEY.`);
  } catch {
    setText(byId("copied"), "The browser gave no access to the clipboard.");
  }
}
