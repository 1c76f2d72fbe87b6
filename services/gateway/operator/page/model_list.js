// The models of the key's tenant, and three questions to begin with.

import { request } from "./api.js";
import { button, byId, make } from "./dom.js";

const DEMO_MODEL = "hearth-demo";
const QUESTIONS = {
  [DEMO_MODEL]: ["What is Hearth?", "What happens when a decode worker dies?", "What is the KV cache?"],
  "": ["Why is the sky blue?", "Write a haiku about a lighthouse.", "List three uses of a paper clip."],
};
const MAX_TRIED = 8; // models, for one that can chat

let models = [];

export const takesImages = () => models.find(({ id }) => id === byId("model").value)?.input_modalities?.includes("image");

// `wanted`: the model to choose. Throws ApiError.
export async function listModels(wanted) {
  models = (await (await request("/v1/models")).json()).data;
  const ids = models.map(({ id }) => id);
  const chosen = [wanted, byId("model").value].find((each) => ids.includes(each));
  const options = () => ids.map((id) => make("option", { value: id }, id));
  list(byId("model"), options());
  list(byId("model-b"), [make("option", { value: "" }, "As above"), ...options()]);
  if (ids.length) byId("model").value = await firstThatChats([...new Set([chosen ?? ids[0], ...ids])]);
}

function list(select, options) {
  const chosen = select.value;
  select.replaceChildren(...options);
  if (options.some(({ value }) => value === chosen)) select.value = chosen;
}

// A base model has no chat template.
async function firstThatChats(ids) {
  for (const model of ids.length > 1 ? ids.slice(0, MAX_TRIED) : []) {
    try {
      await request("/tokenize", { body: { model, messages: [{ role: "user", content: "a" }] } });
      return model;
    } catch (error) {
      if (!error.message.includes("no chat template")) return model;
    }
  }
  return ids[0];
}

export function drawQuestions(ask) {
  const questions = QUESTIONS[byId("model").value] ?? QUESTIONS[""];
  byId("questions").replaceChildren(...questions.map((text) => (
    button(text, () => ask(text), ""))));
}
