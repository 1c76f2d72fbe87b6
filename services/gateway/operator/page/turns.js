// The conversation of this tab: its turns, what a request repeats of them, and their storage.

import { Answer } from "./answer.js";
import { store } from "./api.js";
import { button, byId, make } from "./dom.js";

const KEY = "hearth.conversation";
const MAX_CHARS = 500_000; // of what is stored: the oldest turns are left out
// {element} and `user`: a text, with the data URL of its `image` if it has one; or `tool`: {id, name, text, column}; or `answers`: of each column, or one
let turns = [];

export const isLast = (turn) => turns.at(-1) === turn;
export const lastTurn = () => turns.at(-1);
export const holds = (turn) => turns.includes(turn);

export function addUser(text, onEdit, image) {
  const edit = button("Edit", () => onEdit(turn));
  const turn = { user: text, image, element: box("user", "You", text, edit) };
  if (image) turn.element.append(make("img", { src: image, alt: "Picture" }));
  return add(turn);
}

// `column`: of a pair; null: of all.
export function addTool({ id, name, text, column }) {
  return add({ tool: { id, name, text, column }, element: box("tool", `Result of ${name}`, text) });
}

export function addAnswers(answers) {
  const elements = answers.filter(Boolean).map(({ element }) => element);
  return add({ answers, element: answers.length > 1 ? make("div", { class: "pair" }, ...elements) : elements[0] });
}

function box(kind, title, text, ...more) {
  return make("article", { class: `turn ${kind}`, "aria-label": title },
    make("header", {}, make("strong", {}, title), ...more), make("div", { class: "plain" }, text));
}

function add(turn) {
  turns.push(turn);
  byId("turns").append(turn.element);
  turn.element.scrollIntoView({ block: "end" });
  return turn;
}

// Drops a turn and all that followed. Returns what puts them back.
export function dropFrom(turn) {
  const dropped = turns.splice(turn ? turns.indexOf(turn) : 0);
  for (const { element } of dropped) element.remove();
  save();
  return () => {
    dropped.forEach(add);
    save();
  };
}

// A question whose answer failed is left out: many templates demand that roles alternate.
export function messagesOf(column) {
  const messages = [];
  for (const turn of turns) {
    const message = messageOf(turn, column);
    if (message?.role === "user" && messages.at(-1)?.role === "user") messages.pop();
    if (message) messages.push(message);
  }
  return messages;
}

export const userMessage = (text, image) => ({ role: "user", content: image
  ? [{ type: "image_url", image_url: { url: image } }, { type: "text", text }] : text });

function messageOf({ user, image, tool, answers }, column) {
  if (answers) return (answers.length > 1 ? answers[column] : answers[0])?.message;
  if (user !== undefined) return userMessage(user, image);
  const isHere = tool.column === null || tool.column === column;
  return isHere ? { role: "tool", tool_call_id: tool.id, content: tool.text } : undefined;
}

export function save() {
  const parts = turns.map(({ user, image, tool, answers }) => (
    JSON.stringify({ user, image, tool, answers: answers?.map((each) => each?.stored ?? null) })));
  let size = parts.reduce((sum, part) => sum + part.length, 0);
  while (parts.length && (size > MAX_CHARS || !parts[0].startsWith('{"user"'))) size -= parts.shift().length;
  store(KEY, `[${parts.join()}]`);
}

export function restore(onEdit) {
  for (const { user, image, tool, answers } of JSON.parse(sessionStorage.getItem(KEY) || "[]")) {
    if (answers) addAnswers(answers.map((each) => each && Answer.of(each)));
    else if (tool) addTool(tool);
    else addUser(user, onEdit, image);
  }
  return turns;
}
