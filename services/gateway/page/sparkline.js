// The last minutes of one number on a canvas. Redrawn with each new value, while it is in sight.

const NUM_VALUES = 600;

export class Sparkline {
  #values = [];
  #isSeen = true;

  constructor(canvas) {
    this.canvas = canvas;
    new IntersectionObserver(([{ isIntersecting }]) => {
      this.#isSeen = isIntersecting;
      if (isIntersecting) this.draw();
    }).observe(canvas);
  }

  push(value) {
    this.#values.push(value);
    if (this.#values.length > NUM_VALUES) this.#values.shift();
    this.draw();
  }

  draw() {
    const { canvas } = this;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!this.#isSeen || !width) return;
    const scale = devicePixelRatio;
    if (canvas.width !== Math.round(width * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const values = this.#values.slice(-Math.max(60, Math.floor(width)));
    const top = Math.max(1, ...values);
    const step = width / Math.max(59, values.length - 1);
    const x = (index) => width - (values.length - 1 - index) * step;
    const y = (value) => height - 1.5 - (value / top) * (height - 4);
    const color = getComputedStyle(canvas).color;
    context.beginPath();
    values.forEach((value, index) => context.lineTo(x(index), y(value)));
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(width, height);
    context.lineTo(x(0), height);
    context.globalAlpha = 0.14;
    context.fillStyle = color;
    context.fill();
    context.globalAlpha = 1;
  }
}
