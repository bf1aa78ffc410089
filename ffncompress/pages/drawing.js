"use strict";
/* What every page draws with: elements, a tooltip, plots and tables. `data` is what the page is about. */
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const colour = (i) => `var(--c${i % 8})`;
const base = (path) => path.split(/[\\/]/).pop();
const num = (v, digits = 3) => {
  if (v === null || v === undefined) return "";
  if (!isFinite(v)) return String(v);
  const size = Math.abs(v);
  return size >= 1e5 || (size > 0 && size < 1e-3) ? v.toExponential(1) : v.toFixed(size >= 100 ? Math.min(1, digits) : digits);
};

const count = (v) => v.toLocaleString("en");
const short = (v) => (v >= 1e9 ? `${num(v / 1e9, 2)} B` : v >= 1e6 ? `${num(v / 1e6, 1)} M` : count(v));
const signed = (v, digits) => (v === null || v === undefined ? "" : (v >= 0 ? "+" : "") + num(v, digits));
const sound = (p) => Number.isFinite(p.x) && Number.isFinite(p.y);

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "circle", "text", "rect"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function section(title, note, id) {
  const host = make("section", { id }, make("h2", {}, title));
  if (note) host.append(make("p", { class: "note" }, note));
  main.append(host);
  return host;
}

/* A tooltip that follows the pointer, or the finger. */
const tip = document.getElementById("tip");
function tell(node, words) {
  const show = (event) => {
    tip.textContent = words;
    tip.hidden = false;
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - wide - 8))}px`;
    tip.style.top = `${event.clientY + 16 + high > innerHeight ? event.clientY - high - 12 : event.clientY + 16}px`;
  };
  node.addEventListener("pointermove", show);
  node.addEventListener("pointerdown", show);
  node.addEventListener("pointerleave", () => { tip.hidden = true; });
}

/* Axes: plain, logarithmic, or linear around zero and logarithmic beyond (as matplotlib's symlog). */
const SCALES = {
  linear: (v) => v,
  log: (v) => Math.log2(Math.max(v, 1e-12)),
  symlog: (v) => Math.sign(v) * (Math.abs(v) < 1 ? Math.abs(v) : 1 + Math.log10(Math.abs(v))),
};

function ticks(scale, low, high, whole) {
  if (scale === "log" && high / low >= 8) {
    const found = [];
    for (let v = 1; v <= high * 1.01; v *= high / low > 300 ? 4 : 2) if (v >= low * 0.99) found.push(v);
    return found;
  }
  if (scale === "symlog") {
    const found = high > 200 ? [-1000, -100, -10, -1, 0, 1, 10, 100, 1000, 1e4, 1e6] : [-100, -10, -1, 0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200];
    return found.filter((v) => v >= low && v <= high);
  }
  const raw = Math.max((high - low) / (whole ? 12 : 5), whole ? 1 : 0), power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || 1;
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + 1e-9; v += step) found.push(Number(v.toFixed(10)));
  return found;
}

/* series: [{name, colour, points: [{x, y, error, words, radius, label}], line, dash, marker}] */
function plot(host, { series, x, y, height = 260, legend = true }) {
  const box = make("div", { class: "plot" });
  const hidden = new Set();
  if (legend && series.length > 1) {
    const bar = make("div", { class: "legend" });
    series.forEach((each, i) => {
      const button = make("button", { type: "button", "aria-pressed": "true" }, make("i", { style: `border:2px solid ${each.colour};background:${each.marker === "hollow" ? "none" : each.colour}` }), each.name);
      button.addEventListener("click", () => {
        hidden.has(i) ? hidden.delete(i) : hidden.add(i);
        button.setAttribute("aria-pressed", String(!hidden.has(i)));
        draw();
      });
      bar.append(button);
    });
    host.append(bar);
  }
  host.append(box);

  function draw() {
    const width = Math.max(260, box.clientWidth), left = 46, right = 10, top = 8, bottom = 34;
    const shown = series.filter((_, i) => !hidden.has(i));
    const points = shown.flatMap((each) => each.points).filter(sound);
    const xs = points.map((p) => p.x), ys = points.flatMap((p) => [p.y - (p.error || 0), p.y + (p.error || 0)]);
    const span = (axis, values) => {
      const low = axis.min ?? Math.min(...values), high = axis.max ?? Math.max(...values);
      return low === high ? [low - 0.5, high + 0.5] : [low, high];
    };
    const [x0, x1] = points.length ? span(x, xs) : [0, 1], [y0, y1] = points.length ? span(y, ys) : [0, 1];
    const fx = SCALES[x.scale || "linear"], fy = SCALES[y.scale || "linear"];
    const padX = x.pad ?? 0.02;
    const ax = (v) => left + (padX + (1 - 2 * padX) * (fx(v) - fx(x0)) / (fx(x1) - fx(x0))) * (width - left - right);
    const ay = (v) => top + (1 - 0.03 - 0.94 * (fy(v) - fy(y0)) / (fy(y1) - fy(y0))) * (height - top - bottom);
    const clip = (v) => Math.min(Math.max(v, y0), y1);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${y.label} against ${x.label}` });
    for (const v of ticks(y.scale || "linear", y0, y1)) {
      svg.append(make("line", { class: "axis", x1: left, x2: width - right, y1: ay(v), y2: ay(v) }));
      svg.append(make("text", { x: left - 5, y: ay(v) + 4, "text-anchor": "end" }, num(v, 2).replace(/\.?0+$/, "") || "0"));
    }
    for (const v of x.bare ? [] : ticks(x.scale || "linear", x0, x1, x.whole)) {
      svg.append(make("text", { x: ax(v), y: height - bottom + 15, "text-anchor": "middle" }, String(v)));
    }
    svg.append(make("text", { x: (left + width) / 2, y: height - 3, "text-anchor": "middle" }, x.label));
    svg.append(make("text", { transform: `translate(11 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, y.label));
    for (const each of shown) {
      const drawn = each.points.filter(sound);
      if (each.line !== false && drawn.length) {
        const path = drawn.map((p, i) => `${i ? "L" : "M"}${ax(p.x).toFixed(1)} ${ay(clip(p.y)).toFixed(1)}`).join("");
        const line = make("path", { d: path, fill: "none", stroke: each.colour, "stroke-width": 1.6, "stroke-dasharray": each.dash || "none" });
        if (each.words) tell(line, each.words);
        svg.append(line);
      }
      if (each.marker === false) continue;
      for (const p of drawn) {
        if (p.error) svg.append(make("line", { x1: ax(p.x), x2: ax(p.x), y1: ay(clip(p.y - p.error)), y2: ay(clip(p.y + p.error)), stroke: each.colour }));
        const hollow = each.marker === "hollow";
        const dot = make("circle", { cx: ax(p.x), cy: ay(clip(p.y)), r: p.radius || 3.5, fill: hollow ? "var(--card)" : each.colour, stroke: each.colour, "fill-opacity": p.radius ? 0.65 : 1 });
        tell(dot, p.words);
        svg.append(dot);
        if (p.label !== undefined) svg.append(make("text", { x: ax(p.x), y: Math.min(ay(clip(p.y)) - (p.radius || 3.5), ay(clip(p.y + (p.error || 0)))) - 2, "text-anchor": "middle" }, String(p.label)));
      }
    }
    box.replaceChildren(svg);
  }
  new ResizeObserver(draw).observe(box);
  draw();
}

/* Columns: {name, value(row), show(row), words}. A click on a heading sorts. */
function sortable(host, columns, rows) {
  const body = make("tbody"), head = make("tr");
  let by = null, falling = false;
  const fill = () => {
    const order = [...rows];
    if (by) order.sort((a, b) => {
      const [p, q] = [by.value(a), by.value(b)];
      const sign = typeof p === "string" ? p.localeCompare(q) : (p ?? -Infinity) - (q ?? -Infinity);
      return falling ? -sign : sign;
    });
    body.replaceChildren(...order.map((row) => {
      const line = make("tr");
      for (const column of columns) {
        const cell = make("td", column.words ? { class: "words" } : {});
        cell.append(column.show ? column.show(row) : num(column.value(row)));
        line.append(cell);
      }
      return line;
    }));
  };
  for (const column of columns) {
    const heading = make("th", { scope: "col", ...(column.words ? { class: "words" } : {}) });
    const button = make("button", { type: "button" }, column.name);
    button.addEventListener("click", () => {
      falling = by === column ? !falling : false;
      by = column;
      for (const other of head.children) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
      fill();
    });
    if (column.hint) tell(button, column.hint);
    heading.append(button);
    head.append(heading);
  }
  fill();
  host.append(make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), body)));
}

/* Figures to see first: [[figure, what it is]]. */
function cardsOf(cards) {
  return make("div", { class: "cards" }, ...cards.map(([figure, words]) => make("div", {}, make("b", {}, figure), make("span", {}, words))));
}

/* What a colour stands for: [[name, colour]]. */
function keyOf(entries) {
  return make("p", { class: "key" }, ...entries.map(([name, fill]) => make("span", {}, make("i", { style: `background:${fill}` }), name)));
}

/* A command to copy; {folder} in a word is the one that the page lies in, or so many above it. */
function commandOf(words, above = 0) {
  let folder = "FOLDER";
  try {
    if (location.protocol === "file:") folder = decodeURIComponent(location.pathname.split("/").slice(-2 - above)[0]) || folder;
  } catch { /* a name that is no text */ }
  const quoted = (word) => (/^[\w@%+=:,.\/-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
  return make("code", { class: "command" }, words.map((word) => quoted(word.replace("{folder}", () => folder.startsWith("-") ? `./${folder}` : folder))).join(" "));
}
