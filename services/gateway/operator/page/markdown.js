// A small part of Markdown as nodes: paragraphs, headings, fences, lists, bold, inline code.
// All text becomes text nodes. Links stay text; underscores mean nothing.

import { make } from "./dom.js";

const FENCE = /^\s*(\x60{3,}|~{3,})\s*([\w+#.-]*)\s*$/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^(#{1,4})\s+(.*)$/;
const INLINE = /(\x60+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*/g;
const MAX_INLINE_CHARS = 20000; // of one paragraph: longer ones stay plain text

export function render(text) {
  const nodes = document.createDocumentFragment();
  const lines = text.split("\n");
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = [fence, list, heading, paragraph].reduce((found, take) => found || take(lines, at), null);
    nodes.append(block.node);
    at = block.end;
  }
  return nodes;
}

function fence(lines, start) {
  const opening = FENCE.exec(lines[start]);
  if (!opening) return null;
  let end = start + 1;
  while (end < lines.length && lines[end].trim() !== opening[1]) end += 1;
  const code = make("code", {}, lines.slice(start + 1, end).join("\n"));
  const node = make("pre", { tabindex: "0", "aria-label": opening[2] ? `Code: ${opening[2]}` : "Code" }, code);
  return { node, end: Math.min(end + 1, lines.length) };
}

function list(lines, start) {
  const first = ITEM.exec(lines[start]);
  if (!first) return null;
  const isOrdered = first[1] !== undefined;
  const node = make(isOrdered ? "ol" : "ul", isOrdered ? { start: first[1] } : {});
  let end = start;
  for (; end < lines.length; end += 1) {
    const item = ITEM.exec(lines[end]);
    if (!item || (item[1] !== undefined) !== isOrdered) break;
    node.append(make("li", {}, ...inline(item[2])));
  }
  return { node, end };
}

function heading(lines, start) {
  const found = HEADING.exec(lines[start]);
  return found && { node: make("h4", {}, ...inline(found[2])), end: start + 1 };
}

function paragraph(lines, start) {
  let end = start + 1;
  const starts = (line) => FENCE.test(line) || ITEM.test(line) || HEADING.test(line);
  while (end < lines.length && lines[end].trim() && !starts(lines[end])) end += 1;
  return { node: make("p", {}, ...inline(lines.slice(start, end).join("\n"))), end };
}

function inline(text) {
  if (text.length > MAX_INLINE_CHARS) return [text];
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(at, found.index));
    nodes.push(found[1] ? make("code", {}, found[2].trim()) : make("strong", {}, found[3]));
    at = found.index + found[0].length;
  }
  nodes.push(text.slice(at));
  return nodes.filter((node) => node !== "");
}
