// The held-out loss as a line chart that the pointer and the arrow keys read.

import { announce, attr, keyed, text } from "./dom.js";
import { count, loss, plural } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

export class Chart {
  margin = { left: 48, right: 64, top: 14, bottom: 40 };
  points = [];
  chosen = null; // index of the point that is being read

  constructor(svg, empty) {
    [this.svg, this.empty] = [svg, empty];
    this.grid = this.add("g", "gridlines");
    this.area = this.add("path", "area");
    this.line = this.add("path", "line");
    this.last = this.add("circle", "last");
    this.label = this.add("text", "value");
    this.cursor = this.add("g", "cursor");
    this.xTitle = this.add("text", "axis");
    this.yTitle = this.add("text", "axis");
    this.xTitle.textContent = "tokens merged";
    this.yTitle.textContent = "nats/token";
    new ResizeObserver(() => this.render()).observe(svg.parentElement);
    svg.addEventListener("pointermove", (event) => this.point(event.clientX - svg.getBoundingClientRect().left));
    svg.addEventListener("pointerleave", () => this.choose(null));
    svg.addEventListener("blur", () => this.choose(null));
    svg.addEventListener("keydown", (event) => this.key(event));
  }

  add(tag, className, parent = this.svg) {
    const node = document.createElementNS(SVG, tag);
    node.setAttribute("class", className);
    return parent.appendChild(node);
  }

  draw(heldout) {
    const points = [...heldout].sort((a, b) => a[0] - b[0]);
    const last = points.at(-1);
    const same = points.length === this.points.length && last?.[0] === this.points.at(-1)?.[0] && last?.[1] === this.points.at(-1)?.[1];
    if (same && points[0]?.[0] === this.points[0]?.[0]) return;
    this.points = points;
    this.render();
  }

  render() {
    const { points, svg, margin } = this;
    this.empty.hidden = points.length > 0;
    attr(svg, "class", points.length ? "" : "blank");
    const [width, height] = [svg.parentElement.clientWidth, svg.parentElement.clientHeight];
    if (!points.length || !width) return;
    attr(svg, "viewBox", `0 0 ${width} ${height}`);
    const [low, high] = [Math.min(...points.map((p) => p[1])), Math.max(...points.map((p) => p[1]))];
    const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    const y = ticks(low - pad, high + pad, Math.max(3, Math.floor(height / 60)));
    const [from, to] = [points[0][0], points.at(-1)[0]];
    const x = ticks(from, to > from ? to : from + 1, Math.max(2, Math.floor(width / 130)));
    const [x0, x1, y0, y1] = [from, to > from ? to : from + 1, low - pad, high + pad];
    this.x = (tokens) => margin.left + ((tokens - x0) / (x1 - x0)) * (width - margin.left - margin.right);
    this.y = (value) => height - margin.bottom - ((value - y0) / (y1 - y0)) * (height - margin.top - margin.bottom);
    this.frame = { width, height };
    this.drawGrid(x, y);
    const path = points.map(([tokens, value], i) => `${i ? "L" : "M"}${this.x(tokens).toFixed(1)} ${this.y(value).toFixed(1)}`).join("");
    attr(this.line, "d", path);
    attr(this.area, "d", `${path}L${this.x(to).toFixed(1)} ${height - margin.bottom}L${this.x(from).toFixed(1)} ${height - margin.bottom}Z`);
    this.drawLast();
    this.choose(this.chosen);
    const first = points[0][1];
    attr(svg, "aria-label", `Held-out loss from ${loss(first)} to ${loss(points.at(-1)[1])} nats per token over `
      + `${count(to)} tokens, ${plural(points.length, "measurement")}. Arrow keys read single points.`);
  }

  drawGrid(x, y) {
    const { width, height } = this.frame;
    const { left, right, bottom } = this.margin;
    const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(y[1] - y[0] || 1) + 1e-9)));
    const step = x.length > 1 ? x[1] - x[0] : 1;
    const lines = [
      ...y.map((value) => ({ key: `y${value}`, line: [left, this.y(value), width - right, this.y(value)],
        at: [left - 8, this.y(value) + 4, "end"], words: Math.abs(value) >= 1e5 ? value.toExponential(0) : value.toFixed(digits) })),
      ...x.map((value) => ({ key: `x${value}`, line: [this.x(value), height - bottom, this.x(value), height - bottom + 5],
        at: [this.x(value), height - bottom + 18, "middle"], words: tickTokens(value, step) })),
    ];
    keyed(this.grid, lines, (item) => item.key, () => {
      const group = document.createElementNS(SVG, "g");
      this.add("line", "", group);
      this.add("text", "", group);
      return group;
    }, (group, { line, at, words }) => {
      ["x1", "y1", "x2", "y2"].forEach((name, i) => attr(group.firstChild, name, line[i].toFixed(1)));
      this.write(group.lastChild, words, ...at);
    });
    this.write(this.xTitle, "tokens merged", (left + width - right) / 2, height - 4, "middle");
    this.write(this.yTitle, "nats/token", 0, 0, "middle");
    attr(this.yTitle, "transform", `translate(11 ${(height - bottom) / 2}) rotate(-90)`);
  }

  write(node, words, x, y, anchor) {
    text(node, words);
    attr(node, "x", x.toFixed(1));
    attr(node, "y", y.toFixed(1));
    attr(node, "text-anchor", anchor);
  }

  drawLast() {
    const [tokens, value] = this.points.at(-1);
    attr(this.last, "cx", this.x(tokens).toFixed(1));
    attr(this.last, "cy", this.y(value).toFixed(1));
    attr(this.last, "r", 4);
    this.write(this.label, loss(value), this.x(tokens) + 9, this.y(value) + 5, "start");
  }

  point(left) {
    if (!this.points.length || !this.x) return;
    const near = (index) => Math.abs(this.x(this.points[index][0]) - left);
    this.choose(this.points.reduce((best, _, index) => (near(index) < near(best) ? index : best), 0));
  }

  key(event) {
    const end = this.points.length - 1;
    const now = this.chosen ?? end;
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: end, Escape: null }[event.key];
    if (next === undefined || end < 0) return;
    event.preventDefault();
    this.choose(next === null ? null : Math.max(0, Math.min(end, next)));
    if (next !== null) announce(this.words(this.chosen));
  }

  words(index) {
    const [tokens, value] = this.points[index];
    return `${loss(value)} at ${count(tokens)} tokens`;
  }

  choose(index) {
    this.chosen = index !== null && index < this.points.length ? index : null;
    const shown = this.chosen === null ? [] : [this.chosen];
    keyed(this.cursor, shown, () => "cursor", () => {
      const group = document.createElementNS(SVG, "g");
      this.add("line", "", group);
      this.add("circle", "", group);
      this.add("text", "", group);
      return group;
    }, (group, at) => {
      const [x, y] = [this.x(this.points[at][0]), this.y(this.points[at][1])];
      const [line, circle, words] = group.children;
      Object.entries({ x1: x, x2: x, y1: this.margin.top, y2: this.frame.height - this.margin.bottom })
        .forEach(([name, value]) => attr(line, name, value.toFixed(1)));
      Object.entries({ cx: x, cy: y, r: 4 }).forEach(([name, value]) => attr(circle, name, value));
      const right = x > this.frame.width / 2;
      this.write(words, this.words(at), x + (right ? -9 : 9), this.margin.top + 10, right ? "end" : "start");
    });
  }
}

/** Round numbers between `from` and `to`, about `wanted` of them. */
function ticks(from, to, wanted) {
  const rough = (to - from) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const result = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i += 1) result.push(i * step);
  return result;
}

function tickTokens(value, step) {
  const [unit, name] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => value >= size) ?? [1, ""];
  const digits = Math.max(0, Math.min(3, -Math.floor(Math.log10(step / unit) + 1e-9)));
  return `${Number((value / unit).toFixed(digits))}${name && ` ${name}`}`;
}
