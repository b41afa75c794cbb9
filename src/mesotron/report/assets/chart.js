"use strict";
// Charts as inline SVG: lines with bands, marks of events, one cursor and one zoom for all of them.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 200, LEFT = 52, RIGHT = 14, TOP = 14, BOTTOM = 24;
const SIGNS = { warn: "▲", stop: "■", clear: "○", rollback: "↺" };
const MOST_FAINT = 6; // real lines behind smooth ones; more are a carpet
const MOST_READ = 4; // lines whose values fit above a chart; more are listed beside the cursor

function make(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

function show(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
}

function ticks(low, high, count) {
  const least = (high - low) / count;
  const base = 10 ** Math.floor(Math.log10(least));
  const size = [1, 2, 5, 10].map((k) => k * base).find((s) => s >= least * 0.999);
  const found = [];
  for (let k = Math.ceil(low / size); k <= high / size + 1e-9; k++) found.push(k * size);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let k = Math.floor(low); k <= high; k++) {
    for (const m of high - low > 2.5 ? [1] : [1, 2, 5]) {
      const at = k + Math.log10(m);
      if (at >= low && at <= high) found.push(at);
    }
  }
  const every = Math.ceil(found.length / 6);
  return found.filter((_, place) => place % every === 0);
}

// The place of the value in a rising list that is nearest to x.
function nearest(list, x) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(list[low] - x) <= Math.abs(list[high] - x) ? low : high;
}

// A running mean whose memory is `strength` (0 to 1), from both sides, so that nothing comes late;
// gaps stay gaps.
function smoothed(values, strength) {
  const pass = (list) => {
    let sum = 0, weight = 0;
    return list.map((value) => {
      if (value === null) return null;
      sum = sum * strength + value * (1 - strength);
      weight = weight * strength + 1 - strength;
      return sum / weight;
    });
  };
  const back = pass([...values].reverse()).reverse();
  return pass(values).map((value, k) => (value === null ? null : (value + back[k]) / 2));
}

class Chart {
  constructor(place, spec, page) {
    Object.assign(this, { place, spec, page, drawn: false, ownCursor: null });
    this.shared = spec.xName === null;
    this.readout = document.createElement("p");
    this.readout.className = "readout";
    this.readout.setAttribute("aria-hidden", "true");
    this.svg = make("svg", { height: HEIGHT, "aria-hidden": "true" });
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    place.append(this.readout, this.svg, this.tip);
    this.listen();
  }

  lines() {
    return this.spec.lines.filter((line) => !this.page.hidden.has(line.group));
  }

  xs(line) {
    if (line.x) return line.x;
    const grid = this.page.runs[line.run].x[line.grid];
    return grid[this.page.axis] || grid.steps;
  }

  fitX(x) { return this.spec.logX ? Math.log10(x) : x; }

  fitY(y) { return this.spec.log ? Math.log10(y) : y; }

  // What can be drawn: a logarithm needs a number above zero.
  usable(y) { return y !== null && y !== undefined && (!this.spec.log || y > 0); }

  measure() {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    const zoom = this.shared ? this.page.zoom : null;
    for (const line of this.lines()) {
      this.xs(line).forEach((x, k) => {
        if (zoom && (x < zoom[0] || x > zoom[1])) return;
        const at = this.fitX(x);
        if (at < x0) x0 = at;
        if (at > x1) x1 = at;
        for (const y of [line.y[k], line.low?.[k], line.high?.[k]]) {
          if (!this.usable(y)) continue;
          const up = this.fitY(y);
          if (up < y0) y0 = up;
          if (up > y1) y1 = up;
        }
      });
    }
    for (const [y] of this.spec.rules) {
      if (y0 > y1 || !this.usable(y)) continue;
      y0 = Math.min(y0, this.fitY(y));
      y1 = Math.max(y1, this.fitY(y));
    }
    if (zoom) [x0, x1] = zoom;
    if (!(x0 <= x1)) [x0, x1] = [0, 1];
    if (!(y0 <= y1)) [y0, y1] = [0, 1];
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    const level = y0 === y1;
    if (level && y0 === 0) y1 = 1;
    else if (level) { const half = Math.abs(y0) * 0.1; y0 -= half; y1 += half; }
    const pad = (y1 - y0) * 0.06;
    const fromZero = !this.spec.log && (!level || y0 === 0) && y0 >= 0 && y0 < 0.6 * y1;
    const spread = this.spec.lines.some((line) => line.dots) ? (x1 - x0) * 0.04 : 0; // whole dots
    return { x0: x0 - spread, x1: x1 + spread, y0: fromZero ? 0 : y0 - pad, y1: y1 + pad };
  }

  draw() {
    this.drawn = true;
    const width = Math.max(this.place.clientWidth, 160);
    const box = this.measure();
    this.box = box;
    this.width = width;
    this.svg.replaceChildren();
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.toX = (x) => LEFT + ((this.fitX(x) - box.x0) / (box.x1 - box.x0)) * (width - LEFT - RIGHT);
    this.toY = (y) =>
      HEIGHT - BOTTOM - ((this.fitY(y) - box.y0) / (box.y1 - box.y0)) * (HEIGHT - TOP - BOTTOM);
    this.drawAxes();
    const id = `clip${this.page.charts.indexOf(this)}`;
    const clip = make("clipPath", { id }, this.svg);
    // A little wider than the axes: a dot on the edge is whole.
    make("rect", { x: LEFT - 6, y: 0, width: width - LEFT - RIGHT + 12, height: HEIGHT - BOTTOM + 5 }, clip);
    this.inside = make("g", { "clip-path": `url(#${id})` }, this.svg);
    this.drawRules();
    for (const line of this.lines()) this.drawBand(line);
    this.drawMarks();
    for (const line of this.lines()) this.drawLine(line);
    this.pointer = make("g", { class: "pointer" }, this.svg);
    this.point();
  }

  drawAxes() {
    const { box, width } = this;
    const ys = this.spec.log ? logTicks(box.y0, box.y1) : ticks(box.y0, box.y1, 4);
    for (const at of ys) {
      const value = this.spec.log ? 10 ** at : at;
      const y = this.toY(value);
      make("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y, class: "grid" }, this.svg);
      make("text", { x: LEFT - 6, y: y + 4, class: "tick end" }, this.svg, show(+value.toPrecision(6)));
    }
    const count = Math.max(2, Math.floor(width / 110));
    const xs = this.spec.logX ? logTicks(box.x0, box.x1) : ticks(box.x0, box.x1, count);
    for (const at of xs) {
      const value = this.spec.logX ? 10 ** at : at;
      const x = this.toX(value);
      make("line", { x1: x, x2: x, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4, class: "grid" }, this.svg);
      make("text", { x, y: HEIGHT - 6, class: "tick" }, this.svg, show(+value.toPrecision(6)));
    }
    make("line", { x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM, class: "axis" }, this.svg);
    const name = this.shared ? this.page.axis : this.spec.xName;
    make("text", { x: LEFT - 6, y: HEIGHT - 6, class: "tick end axis-name" }, this.svg, name);
  }

  drawRules() {
    for (const [height, word] of this.spec.rules) {
      const y = this.toY(height);
      make("line", { x1: LEFT, x2: this.width, y1: y, y2: y, class: "rule" }, this.inside);
      make("text", { x: LEFT + 6, y: y - 4, class: "tick start" }, this.inside, word);
    }
  }

  // Pieces of a column without gaps, as lists of places; a sparse one is a single piece.
  pieces(values) {
    const known = values.map((y, k) => (this.usable(y) ? k : -1)).filter((k) => k >= 0);
    if (known.length * 2 < values.length) return { pieces: [known], sparse: true };
    const pieces = [];
    known.forEach((k, n) => {
      if (n && known[n - 1] === k - 1) pieces[pieces.length - 1].push(k); else pieces.push([k]);
    });
    return { pieces, sparse: known.length <= 1 };
  }

  path(xs, values, pieces) {
    return pieces.map((piece) => piece.map((k, n) =>
      `${n ? "L" : "M"}${this.toX(xs[k]).toFixed(1)} ${this.toY(values[k]).toFixed(1)}`).join("")).join("");
  }

  drawBand(line) {
    if (!line.low) return;
    const xs = this.xs(line);
    const both = line.low.map((y, k) => (this.usable(y) && this.usable(line.high[k]) ? y : null));
    for (const piece of this.pieces(both).pieces) {
      if (!piece.length) continue;
      const back = [...piece].reverse();
      const d = this.path(xs, line.high, [piece]) + this.path(xs, line.low, [back]).replace("M", "L") + "Z";
      make("path", { d, class: `band c${line.colour}` }, this.inside);
    }
  }

  drawLine(line) {
    const xs = this.xs(line), style = `c${line.colour} d${line.dash}`;
    const { pieces, sparse } = this.pieces(line.y);
    if (line.dots !== "crosses") {
      const soft = this.shared && this.page.smooth > 0 && !sparse;
      const faint = soft && this.lines().length <= MOST_FAINT;
      if (faint) make("path", { d: this.path(xs, line.y, pieces), class: `line raw c${line.colour}` }, this.inside);
      const values = soft ? smoothed(line.y, this.page.smooth) : line.y;
      make("path", { d: this.path(xs, values, pieces), class: `line ${style}` }, this.inside);
    }
    if (!sparse && !line.dots) return;
    for (const k of pieces.flat()) this.drawDot(this.toX(xs[k]), this.toY(line.y[k]), line, this.inside);
  }

  // Round, square, diamond or triangle, by the dash: told apart without colour.
  drawDot(x, y, line, parent) {
    if (line.dots === "crosses") {
      make("path", { d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`, class: "cross" }, parent);
      return;
    }
    const shapes = [
      `M${x - 3.5} ${y}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0`,
      `M${x - 3} ${y - 3}h6v6h-6Z`,
      `M${x} ${y - 4.5}l4.5 4.5l-4.5 4.5l-4.5 -4.5Z`,
      `M${x} ${y - 4}l4 7h-8Z`,
    ];
    make("path", { d: shapes[line.dash], class: `dot c${line.colour}` }, parent);
  }

  drawMarks() {
    if (!this.shared) return;
    for (const { run, colour } of new Map(this.lines().map((line) => [line.run, line])).values()) {
      const { marks, x } = this.page.runs[run];
      for (const mark of marks) {
        const grid = x.main, place = nearest(grid.steps, mark.step);
        const at = this.toX(this.page.axis === "steps" ? mark.step : (grid[this.page.axis] || grid.steps)[place]);
        if (at < LEFT - 1 || at > this.width - RIGHT + 1) continue;
        const whose = this.page.runs.length > 1 ? `mark owned c${colour}` : `mark ${mark.severity}`;
        const group = make("g", { class: whose }, this.svg);
        if (this.page.runs.length <= 4) {
          make("line", { x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }, group);
        }
        make("text", { x: at, y: 10 }, group, SIGNS[mark.severity] || "●");
        const name = this.page.runs.length > 1 ? `${this.page.runs[run].name}, ` : "";
        make("title", {}, group, `${name}step ${mark.step}, ${mark.text}`);
      }
    }
  }

  cursor() { return this.shared ? this.page.cursor : this.ownCursor; }

  // Draws the cursor and tells the values under it.
  point() {
    if (!this.drawn) return;
    this.pointer.replaceChildren();
    const x = this.cursor();
    if (x === null || this.fitX(x) < this.box.x0 || this.fitX(x) > this.box.x1) {
      this.readout.textContent = "";
      this.tip.hidden = true;
      return;
    }
    const at = this.toX(x);
    make("line", { x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor" }, this.pointer);
    const read = [];
    for (const line of this.lines()) {
      const xs = this.xs(line);
      const known = this.pieces(line.y).pieces.flat();
      if (!known.length) continue;
      const k = known[nearest(known.map((place) => xs[place]), x)];
      const y = line.y[k];
      this.drawDot(this.toX(xs[k]), this.toY(y), line, this.pointer);
      read.push({ line, y, band: line.low ? [line.low[k], line.high[k]] : null });
    }
    this.read = { x, read };
    this.tell(at, x, read);
  }

  tell(at, x, read) {
    const head = `${this.shared ? this.page.axis : this.spec.xName} ${show(x)}`;
    const few = read.length <= MOST_READ;
    const words = read.map(({ line, y, band }) =>
      `${read.length > 1 ? `${line.name} ` : ""}${show(y)}${band && few ? ` (${show(band[0])} to ${show(band[1])})` : ""}`);
    this.readout.textContent = few ? `${head}: ${words.join(", ")}` : head;
    this.tip.hidden = few || this.page.active !== this;
    if (this.tip.hidden) return;
    const sorted = [...read].sort((a, b) => b.y - a.y).slice(0, 14);
    this.tip.replaceChildren(...sorted.map(({ line, y }) => {
      const row = document.createElement("div");
      row.className = `tip-row c${line.colour}`;
      row.textContent = `${show(y)}  ${line.name}`;
      return row;
    }));
    const left = at > this.width / 2;
    this.tip.style.left = left ? "" : `${at + 12}px`;
    this.tip.style.right = left ? `${this.width - at + 12}px` : "";
  }

  fromPixel(pixel) {
    const { x0, x1 } = this.box;
    const at = x0 + ((pixel - LEFT) / (this.width - LEFT - RIGHT)) * (x1 - x0);
    const inside = Math.min(Math.max(at, x0), x1);
    return this.spec.logX ? 10 ** inside : inside;
  }

  setCursor(x) {
    this.page.active = this;
    if (this.shared) this.page.setCursor(x); else { this.ownCursor = x; this.point(); }
  }

  // The next point of the first line, for the arrow keys.
  neighbour(step) {
    const line = this.lines()[0];
    if (!line) return null;
    const xs = this.xs(line), x = this.cursor();
    const from = x !== null ? nearest(xs, x) : step > 0 ? -1 : xs.length;
    return xs[Math.min(Math.max(from + step, 0), xs.length - 1)];
  }

  listen() {
    let start = null;
    const pixel = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    this.svg.addEventListener("pointermove", (event) => {
      if (!this.drawn) return;
      this.setCursor(this.fromPixel(pixel(event)));
      if (start !== null && this.shared) {
        const now = pixel(event);
        make("rect", { x: Math.min(start, now), y: TOP, width: Math.abs(now - start),
          height: HEIGHT - TOP - BOTTOM, class: "selection" }, this.pointer);
      }
    });
    this.svg.addEventListener("pointerdown", (event) => {
      if (!this.drawn) return;
      if (event.pointerType === "mouse" && event.button === 0) start = pixel(event);
      else this.setCursor(this.fromPixel(pixel(event)));
    });
    window.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [a, b] = [start, pixel(event)].sort((p, q) => p - q);
      start = null;
      if (this.shared && b - a > 8) this.page.setZoom([this.fromPixel(a), this.fromPixel(b)]);
    });
    this.svg.addEventListener("pointerleave", () => { if (start === null) this.setCursor(null); });
    this.svg.addEventListener("dblclick", () => this.page.setZoom(null));
    this.place.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
      if (event.key === "Escape") { this.setCursor(null); this.page.setZoom(null); return; }
      if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      if (!this.drawn) this.draw();
      this.setCursor(this.neighbour(steps[event.key]));
      this.page.announce();
    });
  }
}
