// One answer: text, folded thinking, tool calls, figures.
// Text is appended to one node a frame; Markdown is built once, at the end. With
// probabilities each token is a node, and there is no Markdown.

import { byId, make, setText } from "./dom.js";
import { Figures } from "./figures.js";
import { legend, tokens } from "./heat.js";
import { render } from "./markdown.js";
import { pauseText } from "./moves.js";

const PAUSE_S = 0.5;
const SENTENCE_END = /[.!?:。！？]\s|\n/g;

export class Answer {
  text = "";
  reasoning = "";
  calls = [];
  info = null;
  requestId = "";
  moves = []; // to other workers
  #pending = "";
  #frame = 0;
  #spoken = 0;
  #usage = null;
  #title;
  #note = null; // while it streams
  #schema = false;
  #pause = make("span", { class: "badge moved", hidden: true });
  #watch = setInterval(() => this.#showPause(), 100);
  #marked = [];
  #node = document.createTextNode("");
  #thinkingNode = document.createTextNode("");

  // `body`: of its request. `name`: its title. `differs`: how it differs from the other column.
  constructor(body, name = "Answer", differs = "") {
    this.#title = { seed: body.seed, name, differs };
    this.hasHeat = Boolean(body.logprobs);
    this.figures = new Figures(body.seed);
    this.content = make("div", { class: "content plain" }, this.#node);
    this.thinking = make("details", { class: "thinking", hidden: true },
      make("summary", {}, "Thinking"), make("div", { class: "plain" }, this.#thinkingNode));
    this.callList = make("div", { class: "calls" });
    this.badges = make("span", { class: "badges" }, this.#pause);
    this.element = make("article", { class: "turn assistant", "aria-label": name },
      make("header", {}, make("span", {}, make("strong", {}, name), differs && make("span", {}, " · ", differs)), this.badges),
      this.thinking, this.content, this.callList,
      make("footer", {}, this.figures.element, this.figures.workers));
  }

  take(chunk) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (delta.content || thought || delta.tool_calls) this.figures.arrived();
    if (thought) this.reasoning += thought;
    if (delta.content) {
      this.text += delta.content;
      if (this.hasHeat) this.#marked.push(...tokens(delta.content, chunk.choices[0].logprobs?.content));
      else this.#pending += delta.content;
    }
    for (const part of delta.tool_calls ?? []) this.#takeCall(part);
    if (chunk.usage) this.#usage = chunk.usage;
    if (chunk.hearth) this.info = chunk.hearth;
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#draw());
  }

  // Another worker goes on.
  moved(move) {
    this.moves.push(move);
    this.#showPause();
  }

  // A pause that is long enough to be noticed, or the last move.
  #showPause() {
    const silence = this.figures.silence ?? 0;
    const move = this.moves.at(-1);
    this.#pause.hidden = silence < PAUSE_S && !move;
    if (silence >= PAUSE_S) setText(this.#pause, `paused · ${silence.toFixed(1)} s`);
    else if (move) setText(this.#pause, `moved to ${move.worker} · ${pauseText(move.pause_s)}`);
  }

  end(note, schema) {
    [this.#note, this.#schema] = [note, schema];
    clearInterval(this.#watch);
    this.#pause.remove();
    cancelAnimationFrame(this.#frame);
    this.#draw();
    if (this.hasHeat) this.content.after(legend());
    else {
      this.content.classList.remove("plain");
      this.content.replaceChildren(render(this.text));
    }
    this.#speak(true);
    this.figures.end(this.requestId, this.info, this.moves);
    if (this.moves.length) this.badge(this.moves.length > 1 ? `moved ${this.moves.length}×` : `moved to ${this.moves[0].worker}`, "moved");
    if (note) this.badge(note, "warn");
    if (schema) this.#badgeSchema();
  }

  badge(text, kind = "") {
    this.badges.append(make("span", { class: `badge ${kind}` }, text));
  }

  get hasFailed() {
    return this.#note === "failed";
  }

  // Whether it ended before its first word.
  get isEmpty() {
    return ["failed", "stopped"].includes(this.#note) && !this.text && !this.reasoning && !this.calls.length;
  }

  // Of an earlier visit.
  static of({ seed, name, differs, text, reasoning, calls, note, schema, figures, ...ends }) {
    const answer = new Answer({ seed }, name, differs);
    const called = calls.map((call, index) => ({ index, id: call.id, function: { name: call.name, arguments: call.args } }));
    answer.#spoken = Infinity;
    answer.take({ choices: [{ delta: { content: text, reasoning, tool_calls: called } }] });
    Object.assign(answer, ends);
    answer.end(note, schema);
    answer.figures.show(figures);
    return answer;
  }

  get stored() {
    const { text, reasoning, info, requestId, moves } = this;
    const calls = this.calls.map(({ id, name, args }) => ({ id, name, args }));
    return {
      ...this.#title, text, reasoning, calls, info, requestId, moves,
      note: this.#note ?? "stopped", schema: this.#schema, figures: this.figures.shown,
    };
  }

  // As the next request needs it; undefined without any.
  get message() {
    if (this.hasFailed || (!this.text && !this.calls.length)) return undefined;
    const message = { role: "assistant", content: this.text || null };
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, args }) => (
        { id, type: "function", function: { name, arguments: args } }));
    }
    return message;
  }

  #takeCall(part) {
    const index = part.index ?? 0;
    let call = this.calls[index];
    if (!call) {
      call = { id: "", name: "", args: "", title: make("strong"), code: make("code") };
      this.calls[index] = call;
      this.callList.append(make("div", { class: "call" },
        make("div", {}, make("span", { class: "badge" }, "tool call"), " ", call.title), make("pre", { tabindex: "0" }, call.code)));
    }
    call.id ||= part.id ?? "";
    call.name ||= part.function?.name ?? "";
    call.args += part.function?.arguments ?? "";
  }

  #draw() {
    this.#frame = 0;
    const isAtEnd = innerHeight + scrollY > document.documentElement.scrollHeight - 80;
    if (this.#pending) this.#node.appendData(this.#pending);
    this.#pending = "";
    this.content.append(...this.#marked.splice(0));
    if (this.reasoning) {
      this.thinking.hidden = false;
      this.#thinkingNode.appendData(this.reasoning.slice(this.#thinkingNode.length));
    }
    for (const call of this.calls) {
      call.title.textContent = call.name;
      call.code.textContent = call.args;
    }
    this.figures.draw(this.#usage);
    this.#speak(false);
    if (isAtEnd) scrollTo(0, document.documentElement.scrollHeight);
  }

  // Screen readers get finished sentences.
  #speak(isEnd) {
    const rest = this.text.slice(this.#spoken);
    let end = isEnd ? rest.length : 0;
    if (!isEnd) for (const found of rest.matchAll(SENTENCE_END)) end = found.index + found[0].length;
    if (!end) return;
    this.#spoken += end;
    byId("spoken").replaceChildren(make("p", {}, rest.slice(0, end)));
  }

  #badgeSchema() {
    try {
      JSON.parse(this.text);
      this.badge("valid JSON", "good");
    } catch {
      this.badge("not JSON", "bad");
    }
  }
}
