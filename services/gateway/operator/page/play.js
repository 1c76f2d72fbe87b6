// The playground: answers to the conversation of this tab. Nothing is sent but by Send, Retry and a question to begin with.

import { ApiError, idOf, keyOf, readEvents, request } from "./api.js";
import { Answer } from "./answer.js";
import { button, byId, make, setText } from "./dom.js";
import { clearDryRun, dryRun } from "./dry_run.js";
import { timelineLink } from "./figures.js";
import { askForKeys } from "./keys.js";
import { drawQuestions, listModels, takesImages } from "./model_list.js";
import { BadSettings, markRejected, readColumns, restoreSettings, saveSettings, setUpSettings } from "./settings.js";
import { asCurl, asJavaScript, asPython } from "./snippets.js";
import { addAnswers, addTool, addUser, dropFrom, holds, isLast, lastTurn, messagesOf, restore, save, userMessage } from "./turns.js";

const NAMES = ["Answer A", "Answer B"];
const LOST = "The gateway was lost; send again.";
let running = null; // the AbortController of the answers that stream
let countdown = 0;
let picture; // the data URL of the image of the next question

const status = (...parts) => byId("play-status").replaceChildren(...parts);

export function setUpPlay() {
  setUpSettings();
  const on = (id, event, run) => byId(id).addEventListener(event, run);
  on("composer", "submit", (event) => {
    event.preventDefault();
    send();
  });
  on("prompt", "keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  on("composer", "dragover", (event) => event.preventDefault());
  on("composer", "drop", (event) => {
    event.preventDefault();
    readPicture(event.dataTransfer.files[0]);
  });
  on("prompt", "paste", (event) => readPicture(event.clipboardData.files[0]));
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("keys").open && !byId("play").hidden) running?.abort();
  });
  on("stop-answer", "click", () => running?.abort());
  on("clear", "click", clear);
  for (const [name, write] of Object.entries({ curl: asCurl, Python: asPython, JavaScript: asJavaScript })) {
    const each = button(name, () => copy(write, name));
    each.ariaLabel = `Copy as ${name}`;
    byId("copies").append(each);
  }
  on("picture", "click", () => {
    make("input", { type: "file", accept: "image/*", onchange: ({ target }) => readPicture(target.files[0]) }).click();
  });
  on("try-run", "click", tryRun);
  on("model", "change", offer);
  if (matchMedia("(max-width: 900px)").matches) byId("settings-fold").open = false;
  restoreSettings();
  for (const turn of restore(edit)) if (turn.answers) offerMore(turn);
  addEventListener("pagehide", () => {
    saveSettings();
    save();
  });
}

function offer() {
  byId("picture").hidden = !takesImages();
  drawQuestions((text) => {
    byId("prompt").value = text;
    send();
  });
}

function readPicture(file) {
  if (!file?.type.startsWith("image/")) return;
  const reader = new FileReader();
  reader.onload = () => attach(reader.result);
  reader.readAsDataURL(file);
}

function attach(url) {
  picture = url;
  const composer = byId("composer");
  composer.querySelector(".picture")?.remove();
  const remove = () => attach();
  if (url) composer.prepend(make("button", { class: "picture", title: "Remove", onclick: remove }, make("img", { src: url, alt: "Picture" })));
}

export async function loadModels(wanted = "") {
  if (!keyOf("tenant")) return status("Enter an API key under Keys to begin.");
  try {
    await listModels(wanted);
    offer();
    status();
  } catch (error) {
    show(error);
  }
}

function clear() {
  running?.abort();
  if (lastTurn()) {
    const undo = dropFrom();
    status("The conversation was dropped. ", button("Undo", () => {
      undo();
      status();
    }));
  }
  byId("prompt").focus();
}

function send() {
  const text = byId("prompt").value;
  if (running || (!text.trim() && !lastTurn()?.tool)) return;
  if (!keyOf("tenant")) return askForKeys();
  const columns = settingsOrNull();
  if (!columns) return;
  if (text.trim()) {
    addUser(text, edit, picture);
    attach();
  }
  byId("prompt").value = "";
  stream(bodiesOf(columns));
}

// `isIn`: whether a column sends; the others wait.
const bodiesOf = (columns, isIn = () => true) => columns.map((fields, column) => (
  isIn(column) ? bodyOf(withSeed(fields, columns), column) : null));

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
    status("Nothing was sent: a setting is not valid.");
    return null;
  }
}

function bodyOf({ model, system, ...others }, column = 0) {
  const messages = messagesOf(column);
  if (system.trim()) messages.unshift({ role: "system", content: system });
  return { model, messages, stream: true, stream_options: { include_usage: true }, ...others };
}

// Puts a question into the composer, above what is written there, and drops it with all that followed.
function edit(turn) {
  running?.abort();
  compose(turn.user);
  attach(turn.image);
  dropFrom(turn);
}

function compose(text) {
  byId("prompt").value = [text, byId("prompt").value].filter(Boolean).join("\n");
  byId("prompt").focus();
}

// `bodies`: of each column; null: that column waits.
async function stream(bodies) {
  const asked = lastTurn();
  const isPair = bodies.length > 1;
  const answers = bodies.map((body, column) => body && new Answer(
    body, isPair ? NAMES[column] : "Answer", isPair ? unlike(body, bodies[1 - column]) : ""));
  const turn = addAnswers(answers);
  const controller = new AbortController();
  begin(controller);
  const errors = await Promise.all(answers.map((answer, column) => answer && fill(answer, bodies[column], controller.signal)));
  finish(controller);
  if (holds(turn)) settle(turn, asked);
  errors.forEach((error, column) => error && show(error, column));
  save();
}

// A question without any answer returns to the composer.
function settle(turn, asked) {
  const answers = turn.answers.filter(Boolean);
  if (answers.every((each) => each.isEmpty)) {
    if (asked.user !== undefined) edit(asked);
    else dropFrom(turn);
    return;
  }
  if (asked.user !== undefined && answers.every((each) => each.hasFailed)) compose(asked.user);
  offerMore(turn);
}

// Returns the error that ended the answer, if any.
async function fill(answer, body, signal) {
  let note = "", failure = null;
  try {
    const response = await request("/v1/chat/completions", { body, signal, headers: { "x-hearth-moves": "1" } });
    answer.requestId = idOf(response);
    note = await receive(response, answer);
  } catch (error) {
    note = error.name === "AbortError" ? "stopped" : "failed";
    if (note === "failed") failure = error;
  }
  answer.end(note, Boolean(body.response_format));
  return failure;
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
    if (chunk.error) throw new ApiError(chunk.error.message, 200, { requestId: answer.requestId });
    reason = chunk.choices?.[0]?.finish_reason ?? reason;
    answer.take(chunk);
  }
  throw new ApiError(LOST, 0);
}

function begin(controller) {
  running = controller;
  clearInterval(countdown);
  status();
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

// Another try, and fields for the results of calls, which are typed by hand.
function offerMore(turn) {
  turn.answers.forEach((answer, column) => {
    answer?.badges.append(button("Retry", () => retry(turn), "quiet retry"));
    if (answer?.calls.length && isLast(turn)) offerResults(answer, column, turn);
  });
}

function retry(turn) {
  const columns = running ? null : settingsOrNull();
  if (!columns) return;
  dropFrom(turn);
  if (byId("prompt").value === lastTurn().user) byId("prompt").value = "";
  stream(bodiesOf(columns, (column) => turn.answers[column] !== null));
}

function offerResults(answer, column, turn) {
  const isPair = turn.answers.length > 1;
  const inputs = answer.calls.map((call) => (
    make("input", { placeholder: `Result of ${call.name}`, "aria-label": `Result of ${call.name}` })));
  const form = make("form", { class: "results", onsubmit: (event) => {
    event.preventDefault();
    const columns = running ? null : settingsOrNull();
    if (!columns) return;
    form.remove();
    answer.calls.forEach(({ id, name }, index) => addTool({ id, name, text: inputs[index].value, column: isPair ? column : null }));
    stream(isPair ? bodiesOf(columns.length > 1 ? columns : [...columns, ...columns], (each) => each === column) : bodiesOf(columns.slice(0, 1)));
  } }, ...inputs, make("button", { type: "submit", class: "main" }, "Send results"));
  answer.callList.append(form);
  answer.element.scrollIntoView({ block: "end" });
}

// `column`: whose request was rejected.
function show(error, column = 0) {
  if (!(error instanceof ApiError)) console.error(error);
  const link = error.requestId ? [" ", timelineLink(error.requestId)] : [];
  if (error.status === 401) {
    askForKeys("This API key is not valid.");
  } else if (error.status === 429 && error.retryAfter) {
    countDown(error.message, error.retryAfter);
  } else if (error.param && markRejected(error.param, error.message, column)) {
    status("The gateway did not take a setting.", ...link);
  } else {
    status(error instanceof ApiError && error.status ? error.message : LOST, ...link);
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
  if (draft && body.messages.at(-1)?.role === "user") body.messages.pop();
  if (draft) body.messages.push(userMessage(draft, picture));
  return body;
}

async function tryRun() {
  const body = draftBody();
  if (!body) return;
  if (!body.messages.length) return status("Write a message first.");
  try {
    await dryRun(body);
    status();
  } catch (error) {
    show(error);
  }
}

async function copy(write, name) {
  const body = draftBody();
  if (!body) return;
  try {
    await navigator.clipboard.writeText(write(body));
    setText(byId("copied"), `Copied as ${name}; the key is $HEARTH_API_KEY.`);
  } catch {
    setText(byId("copied"), "No clipboard access.");
  }
}
