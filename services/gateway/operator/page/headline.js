// The figures that matter first, of all gateways, with their last fifteen minutes.

import { Chart, SPAN_S, niceTop } from "./chart.js";
import { byId, count, make, setText } from "./dom.js";

const rate = (value) => (value >= 10 ? count(value) : String(Math.round(10 * value) / 10));
const percent = (share) => `${Number((100 * share).toFixed(share && share < 0.1 ? 1 : 0))} %`;
const short = (value) => (value < 1 ? `${Number((1000 * value).toPrecision(3))} ms` : `${Number(value.toPrecision(3))} s`);
const missing = (value, text) => (value == null ? "–" : text(value));
const total = (samples, name) => samples.reduce((sum, each) => sum + each[name], 0);

// `fields`: of a sample; the first is the large one. `least`: the smallest end of the scale.
const latency = (title, name) => ({
  title, fields: [`${name}_p50_s`, `${name}_p99_s`], text: short, least: 0.01,
  value: (now) => missing(now[`${name}_p50_s`], short), hint: (now) => `p50, and ${missing(now[`${name}_p99_s`], short)} p99` });
const streams = (title, name, hint, isBad = false) => ({
  title, fields: [name], text: count, least: 5, hasBars: true, hint: () => hint,
  value: (_, all) => count(total(all, name)), isBad: (_, all) => isBad && total(all, name) > 0 });
const CARDS = [
  latency("Time to first token", "ttft"),
  latency("Time between tokens", "itl"),
  { title: "Requests", fields: ["requests_per_s"], text: (top) => `${rate(top)}/s`, least: 1,
    value: (now) => rate(now.requests_per_s), hint: () => "a second" },
  { title: "Errors", fields: ["failed_share"], text: percent, least: 0.01, isBad: (now) => now.failed_share > 0,
    value: (now) => missing(now.failed_share, percent), hint: () => "by the cluster itself" },
  streams("Streams moved", "num_moved", "in 15 min"),
  streams("Streams lost", "num_lost", "in 15 min", true),
];
let samples = [];
let cards = null;

export function addSamples(more, isAll) {
  samples = isAll ? more : [...samples, ...more];
  const newest = samples.at(-1)?.at ?? 0;
  samples = samples.filter((each) => each.at > newest - SPAN_S);
}

export function drawHeadline(now, processes) {
  cards ??= CARDS.map(makeCard);
  const num = [...processes.values()].filter((each) => each.role === "gateway").length;
  setText(byId("figures-of"), `Of the last minute, by ${num > 1 ? `all ${num} gateways` : "one gateway"}.`);
  for (const card of cards) drawCard(card, now);
}

function makeCard(spec) {
  const card = { spec, value: make("b", {}, "–"), hint: make("p", { class: "hint" }), top: make("span") };
  card.chart = new Chart(spec.fields.length, spec.hasBars);
  card.element = make("li", { class: "panel" }, make("h2", {}, spec.title), card.value, card.hint,
    scale(card.top), card.chart.element, scale("15 min", "now"));
  byId("headline").append(card.element);
  return card;
}

const scale = (...texts) => make("p", { class: "scale", "aria-hidden": "true" }, ...texts.map((each) => make("span", {}, each)));

function drawCard({ spec, value, hint, top, chart, element }, now) {
  const most = Math.max(0, ...samples.flatMap((each) => spec.fields.map((name) => each[name] ?? 0)));
  const end = Math.max(spec.least, most ? niceTop(most) : 0);
  setText(value, now ? spec.value(now, samples) : "–");
  setText(hint, now ? spec.hint(now) : "no sample yet");
  setText(top, spec.text(end));
  element.classList.toggle("bad", Boolean(now && spec.isBad?.(now, samples)));
  chart.element.setAttribute("aria-label", `${spec.title}, last 15 minutes: at most ${spec.text(most)}`);
  chart.set(samples, spec.fields, end);
}
