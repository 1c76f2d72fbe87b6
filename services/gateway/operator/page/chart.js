// The last fifteen minutes of numbers as lines or bars, against the time.

export const SPAN_S = 900;
// Samples farther apart are not connected.
const GAP_S = 20;
const HEIGHT = 48;

function shape(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// A scale's end that is easy to read: 1, 2 or 5 times a power of ten.
export function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((digit) => digit * power >= value * 0.999) * power;
}

export class Chart {
  constructor(num, hasBars = false) {
    this.hasBars = hasBars;
    this.lines = Array.from({ length: num }, (_, index) => shape("path", { class: index ? "second" : hasBars ? "bars" : "first" }));
    this.element = shape("svg", { viewBox: `0 0 ${SPAN_S} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.element.append(shape("path", { class: "rules", d: `M0 .5H${SPAN_S}M0 24H${SPAN_S}M0 47.5H${SPAN_S}` }), ...this.lines);
  }

  // `fields`: of samples, one for each line, whose value may be null; `top`: the scale's end.
  set(samples, fields, top) {
    const left = (samples.at(-1)?.at ?? 0) - SPAN_S;
    this.lines.forEach((line, index) => {
      let path = "", last = -GAP_S;
      for (const { at, [fields[index]]: value } of samples) {
        const place = `${(at - left).toFixed()} ${((HEIGHT - 2) * (1 - Math.min(1, value / top)) + 1).toFixed(1)}`;
        if (value === null || (this.hasBars && !value)) continue;
        if (this.hasBars) path += `M${place}V${HEIGHT}`;
        else path += at - last > GAP_S ? `M${place}h-3` : `L${place}`;
        last = at;
      }
      line.setAttribute("d", path);
    });
  }
}
