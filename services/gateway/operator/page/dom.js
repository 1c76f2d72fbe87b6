// Builds elements. Text only ever becomes text nodes: nothing here parses markup.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  if (tag === "button") element.type = tag; // sends no form
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value != null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const button = (text, onclick, kind = "quiet") => make("button", { class: kind, onclick }, text);

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 2 : 1)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 1000 && power < units.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${power && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}

export function count(value) {
  return value == null ? "–" : Math.round(value).toLocaleString("en");
}

export const badge = (text, level = "") => make("span", { class: `badge ${level}` }, text);

// A part of what there is, red once nearly all of it is used, and its text.
export function used(share, text) {
  const fill = make("span", { class: share > 0.95 ? "fill full" : "fill" });
  fill.style.transform = `scaleX(${Math.min(1, share).toFixed(3)})`;
  return make("div", { class: "kv" }, make("span", { class: "bar", "aria-hidden": "true" }, fill), text);
}

// Of numbers; null without any.
export function percentile(values, share) {
  if (!values.length) return null;
  const sorted = Float64Array.from(values).sort();
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
