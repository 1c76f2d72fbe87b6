// The playground: a conversation of this tab. Nothing is sent but by Send.

import { ApiError, keyOf, readEvents, request } from "./api.js";
import { Answer } from "./answer.js";
import { byId, make, setText } from "./dom.js";
import { BadSettings, readSettings, setUpSettings } from "./settings.js";
import { asCurl, asPython } from "./snippets.js";

let turns = []; // {message, element}; an answer's also {answer}
let running = null; // the AbortController of the answer that streams
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
  if (matchMedia("(max-width: 900px)").matches) byId("settings-fold").open = false;
}

export async function loadModels() {
  if (!keyOf("tenant")) return status("Enter an API key under Keys to begin.");
  try {
    const { data } = await (await request("/v1/models")).json();
    const chosen = byId("model").value;
    byId("model").replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
    if (data.some(({ id }) => id === chosen)) byId("model").value = chosen;
    status("");
  } catch (error) {
    show(error);
  }
}

function send(askForKeys) {
  const text = byId("prompt").value;
  if (running || (!text.trim() && turns.at(-1)?.message.role !== "tool")) return;
  if (!keyOf("tenant")) return askForKeys();
  const fields = settingsOrNull();
  if (!fields) return;
  if (text.trim()) addUser(text);
  byId("prompt").value = "";
  stream(bodyOf(fields), askForKeys);
}

function settingsOrNull() {
  try {
    return readSettings();
  } catch (error) {
    if (!(error instanceof BadSettings)) throw error;
    byId("settings-fold").open = true;
    status("Nothing was sent: a setting is not valid.");
    return null;
  }
}

function bodyOf(fields) {
  const system = byId("system").value;
  const messages = turns.map(({ message }) => message);
  if (system.trim()) messages.unshift({ role: "system", content: system });
  const { model, ...others } = fields;
  return { model, messages, stream: true, stream_options: { include_usage: true }, ...others };
}

function addUser(text) {
  const edit = make("button", { type: "button", class: "quiet", onclick: () => rerunFrom(element) }, "Edit");
  const element = make("article", { class: "turn user", "aria-label": "You" },
    make("header", {}, make("strong", {}, "You"), edit), make("div", { class: "plain" }, text));
  add({ message: { role: "user", content: text }, element });
}

function add(turn) {
  turns.push(turn);
  byId("turns").append(turn.element);
  turn.element.scrollIntoView({ block: "end" });
}

// Puts a turn into the composer and drops it with all that followed.
function rerunFrom(element) {
  running?.abort();
  const index = turns.findIndex((turn) => turn.element === element);
  byId("prompt").value = turns[index].message.content;
  truncate(index);
  byId("prompt").focus();
}

function truncate(length) {
  for (const { element } of turns.splice(length)) element.remove();
}

async function stream(body, askForKeys) {
  const answer = new Answer();
  const turn = { message: answer.message, element: answer.element };
  const controller = new AbortController();
  add(turn);
  begin(controller);
  let note = "";
  try {
    const response = await request("/v1/chat/completions", { body, signal: controller.signal });
    note = await receive(response, answer);
  } catch (error) {
    note = error.name === "AbortError" ? "stopped" : "failed";
    if (note === "failed") show(error, askForKeys);
  }
  finish(controller);
  answer.end(note, Boolean(body.response_format));
  turn.message = answer.message;
  if (!answer.text && !answer.calls.length && note === "failed") truncate(turns.indexOf(turn));
  if (answer.calls.length && turns.includes(turn)) offerResults(answer, askForKeys);
}

async function receive(response, answer) {
  let reason = "";
  for await (const { data } of readEvents(response)) {
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
function offerResults(answer, askForKeys) {
  const inputs = answer.calls.map((call) => (
    make("input", { placeholder: `Result of ${call.name}`, "aria-label": `Result of ${call.name}` })));
  const form = make("form", { class: "results", onsubmit: (event) => {
    event.preventDefault();
    if (running) return;
    const fields = settingsOrNull();
    if (!fields) return;
    form.remove();
    answer.calls.forEach((call, index) => addResult(call, inputs[index].value));
    stream(bodyOf(fields), askForKeys);
  } }, ...inputs, make("button", { type: "submit", class: "main" }, "Send results"));
  answer.callList.append(form);
  answer.element.scrollIntoView({ block: "end" });
}

function addResult(call, text) {
  const element = make("article", { class: "turn tool", "aria-label": `Result of ${call.name}` },
    make("header", {}, make("strong", {}, `Result of ${call.name}`)), make("div", { class: "plain" }, text));
  add({ message: { role: "tool", tool_call_id: call.id, content: text }, element });
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

async function copy(write, name) {
  const fields = settingsOrNull();
  if (!fields) return;
  const body = bodyOf(fields);
  const draft = byId("prompt").value.trim();
  if (draft) body.messages.push({ role: "user", content: draft });
  try {
    await navigator.clipboard.writeText(write(body));
    setText(byId("copied"), `Copied as ${name}; the key is $HEARTH_API_KEY.`);
  } catch {
    setText(byId("copied"), "The browser gave no access to the clipboard.");
  }
}
