// Tokens marked by their probability, each with the likeliest others in its title.

import { make } from "./dom.js";

// Not by colour alone: less likely tokens have a stronger underline.
const STEPS = [[0.9, ""], [0.5, "h1"], [0.2, "h2"], [0, "h3"]];

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const quoted = (text) => JSON.stringify(text);

// The nodes of a chunk's `text`; one plain node if its tokens do not add up to it.
export function tokens(text, scored) {
  const decoder = new TextDecoder();
  const parts = (scored ?? []).map(({ token, bytes }) => (
    bytes ? decoder.decode(Uint8Array.from(bytes), { stream: true }) : token));
  if (!text || parts.join("") !== text) return [text];
  return parts.map((part, index) => marked(part, scored[index]));
}

function marked(text, { logprob, top_logprobs: others = [] }) {
  const step = STEPS.find(([least]) => Math.exp(logprob) >= least)?.[1] ?? "h3";
  const title = [`${quoted(text)} ${percent(logprob)}`, ...others.filter((each) => each.token !== text)
    .map((each) => `${quoted(each.token)} ${percent(each.logprob)}`)].join("\n");
  return make("span", { class: step, title }, text);
}

export const legend = () => make("p", { class: "hint legend" }, "Probability of each token: ",
  make("span", { class: "h1" }, "under 90 %"), ", ", make("span", { class: "h2" }, "under 50 %"), ", ",
  make("span", { class: "h3" }, "under 20 %"), "; point at a token for its own and the likeliest others.");
