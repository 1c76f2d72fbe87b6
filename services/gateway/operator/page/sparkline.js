// The last minutes of one number on a canvas. All that changed are drawn in one frame, and only
// those in sight; observers give their sizes, so that no drawing forces a layout.

const NUM_VALUES = 600;
const waiting = new Set();
const ofCanvas = new WeakMap();
const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) ofCanvas.get(target).resize(contentRect.width, contentRect.height);
});
const sights = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) ofCanvas.get(target).show(isIntersecting);
});

function drawWaiting() {
  const color = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  for (const each of waiting) each.draw(color);
  waiting.clear();
}

export class Sparkline {
  #values = [];
  #isSeen = false;
  #width = 0;
  #height = 0;

  constructor(canvas) {
    this.canvas = canvas;
    ofCanvas.set(canvas, this);
    sizes.observe(canvas);
    sights.observe(canvas);
  }

  push(value) {
    this.#values.push(value);
    if (this.#values.length > NUM_VALUES) this.#values.shift();
    this.#drawSoon();
  }

  resize(width, height) {
    [this.#width, this.#height] = [width, height];
    this.#drawSoon();
  }

  show(isSeen) {
    this.#isSeen = isSeen;
    this.#drawSoon();
  }

  #drawSoon() {
    if (!this.#isSeen || !this.#width) return;
    if (!waiting.size) requestAnimationFrame(drawWaiting);
    waiting.add(this);
  }

  draw(color) {
    const width = this.#width, height = this.#height, scale = devicePixelRatio;
    this.canvas.width = Math.round(width * scale); // clears it, too
    this.canvas.height = Math.round(height * scale);
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const values = this.#values.slice(-Math.max(60, Math.floor(width)));
    const top = Math.max(1, ...values), step = width / Math.max(59, values.length - 1);
    const left = width - (values.length - 1) * step;
    values.forEach((value, index) => context.lineTo(left + index * step, height - 1.5 - (value / top) * (height - 4)));
    context.strokeStyle = context.fillStyle = color;
    context.lineWidth = 1.5;
    context.stroke();
    context.lineTo(width, height);
    context.lineTo(left, height);
    context.globalAlpha = 0.14;
    context.fill();
  }
}
