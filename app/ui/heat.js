// The heat map. Gradio runs this once for each, with element, trigger, props, server and watch in scope, and config
// written before it.
// Values lie token-major, [token][point][row], so that a new token is an append; rows are layers (or heads).

const P = config.points.length;
const find = (name) => element.querySelector(`.heat-${name}`);
const scroller = find("scroll"), spacer = find("spacer"), canvas = find("canvas"), tip = find("tip");
const ramps = Object.fromEntries(Object.entries(config.ramps).map(([name, text]) => [name, bytes(text)]));

const data = { trace: null, model: "", rows: 0, count: 0, updates: 0, values: new Float32Array(0), tokens: [], ids: [] };
data.at = (point, row, column) => data.values[(column * P + point) * data.rows + row];
const view = { point: 0, log: config.log, perRow: false, hideFirst: Boolean(config.hideFirst), width: 12, follow: true };
let selected = null, hovered = null, pulling = false, dirty = false, ranges = null;
element.heatData = data;
element.heatView = view;

function bytes(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

// ---- data -----------------------------------------------------------------------------------------------------

function receive(value) {
  if (!value) return;
  data.model = value.model || "";
  if (value.trace !== data.trace || value.layers !== data.rows) reset(value);
  if (value.from > data.count) return pull();
  if (value.from < data.count) truncate(value.from);
  append(value);
}

// The canvas has missed something (a merged update, a tab opened late): it asks for the rest.
async function pull() {
  if (pulling || !server.heat_rows) return;
  pulling = true;
  try {
    const value = await server.heat_rows({ trace: data.trace, from: data.count });
    if (value && value.from <= data.count) receive(value);
  } finally {
    pulling = false;
  }
}

function reset(value) {
  Object.assign(data, { trace: value.trace, rows: value.layers, count: 0, tokens: [], ids: [] });
  data.values = new Float32Array(0);
  ranges = freshRanges();
  view.follow = true;
  select(null, false);
}

function truncate(count) {
  data.count = count;
  data.tokens.length = data.ids.length = count;
  ranges = freshRanges();
  measure(0);
  if (selected && selected.column >= count) select(null, false);
}

function append(value) {
  const raw = bytes(value.rows), added = value.tokens.length, start = data.count;
  const needed = (start + added) * P * data.rows;
  if (needed > data.values.length) {
    const grown = new Float32Array(Math.max(needed, 2 * data.values.length));
    grown.set(data.values.subarray(0, start * P * data.rows));
    data.values = grown;
  }
  data.values.set(new Float32Array(raw.buffer), start * P * data.rows);
  for (let i = 0; i < added; i++) {
    data.tokens.push(value.tokens[i]);
    data.ids.push(value.ids[i]);
  }
  data.count += added;
  data.updates += 1;
  measure(start);
  redraw();
}

// Smallest positive and largest magnitude of each (point, row); the first token apart, for it dwarfs all others.
function freshRanges() {
  const size = P * data.rows;
  return { low: new Float32Array(size).fill(Infinity), high: new Float32Array(size), first: new Float32Array(size) };
}

function measure(start) {
  const size = P * data.rows;
  for (let column = start; column < data.count; column++) {
    for (let i = 0; i < size; i++) {
      const value = Math.abs(data.values[column * size + i]);
      if (!Number.isFinite(value)) continue;
      if (column === 0) { ranges.first[i] = value; continue; }
      if (value > 0 && value < ranges.low[i]) ranges.low[i] = value;
      if (value > ranges.high[i]) ranges.high[i] = value;
    }
  }
}

// The scale's ends for one row, or for all rows of the point.
function range(row) {
  const start = view.point * data.rows;
  let low = Infinity, high = 0;
  const [from, to] = view.perRow && row !== null ? [row, row + 1] : [0, data.rows];
  for (let i = start + from; i < start + to; i++) {
    low = Math.min(low, ranges.low[i]);
    high = Math.max(high, ranges.high[i]);
    if (!view.hideFirst || data.count === 1) {
      if (ranges.first[i] > 0) low = Math.min(low, ranges.first[i]);
      high = Math.max(high, ranges.first[i]);
    }
  }
  return { low: Number.isFinite(low) ? low : 0, high };
}

// 0 to 1 along the colours; NaN where there is nothing to draw.
function level(value, ends) {
  if (!Number.isFinite(value)) return NaN;
  if (config.signed) return ends.high ? 0.5 + value / (2 * ends.high) : 0.5;
  if (!view.log) return ends.high ? value / ends.high : NaN;
  if (!(value > 0)) return NaN;
  return ends.high > ends.low ? Math.log(value / ends.low) / Math.log(ends.high / ends.low) : 1;
}

// ---- picture ----------------------------------------------------------------------------------------------------

const dark = () => document.body.classList.contains("dark");
const ramp = () => ramps[config.signed ? (dark() ? "dark" : "light") : "sequential"];

function redraw() {
  if (dirty) return;
  dirty = true;
  requestAnimationFrame(() => {
    dirty = false;
    if (element.isConnected && scroller.clientWidth) draw();
  });
}

function draw() {
  const width = scroller.clientWidth, height = scroller.clientHeight, ratio = window.devicePixelRatio || 1;
  spacer.style.width = `${LEFT + data.count * view.width + 8}px`;
  if (view.follow) scroller.scrollLeft = scroller.scrollWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  find("empty").hidden = data.count > 0;
  title.textContent = [config.label, data.model].filter(Boolean).join(", ");
  find("newest").hidden = view.follow;
  if (data.count) paint(pen, box(width, height, view.width, scroller.scrollLeft));
  legend();
  describe();
}

const LEFT = 44, TOP = 6;

function box(width, height, cell, scroll) {
  const bottom = cell >= 9 ? 72 : 22;
  const first = Math.floor(scroll / cell), shift = scroll - first * cell;
  const last = Math.min(data.count, Math.ceil((scroll + width - LEFT) / cell));
  return { width, height, cell, first, last, shift, tall: Math.max(1, (height - TOP - bottom) / Math.max(1, data.rows)) };
}

// Layer 0 lies at the bottom: the stream flows upwards.
const rowTop = (b, row) => TOP + (data.rows - 1 - row) * b.tall;
const columnLeft = (b, column) => LEFT + (column - b.first) * b.cell - b.shift;

function paint(pen, b) {
  const colours = ramp(), many = b.last - b.first;
  if (many <= 0) return;
  const image = new ImageData(many, data.rows);
  for (let row = 0; row < data.rows; row++) {
    const ends = range(row);
    for (let i = 0; i < many; i++) {
      if (b.first + i === 0 && view.hideFirst) continue;
      const at = level(data.at(view.point, row, b.first + i), ends);
      if (Number.isNaN(at)) continue;
      const step = 3 * Math.round(255 * Math.min(1, Math.max(0, at)));
      image.data.set([colours[step], colours[step + 1], colours[step + 2], 255], 4 * ((data.rows - 1 - row) * many + i));
    }
  }
  const small = new OffscreenCanvas(many, data.rows);
  small.getContext("2d").putImageData(image, 0, 0);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, b.width - LEFT, b.height);
  pen.clip();
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, columnLeft(b, b.first), TOP, many * b.cell, data.rows * b.tall);
  if (b.first === 0 && view.hideFirst) hatch(pen, columnLeft(b, 0), TOP, b.cell, data.rows * b.tall);
  columnAxis(pen, b);
  for (const [cell, strong] of [[hovered, false], [selected, true]]) if (cell) outline(pen, b, cell, strong);
  pen.restore();
  rowAxis(pen, b);
}

const ink = (name) => getComputedStyle(element).getPropertyValue(name).trim() || "#888";

function hatch(pen, x, y, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.strokeStyle = ink("--border-color-primary");
  pen.beginPath();
  for (let at = y - width; at < y + height; at += 5) pen.moveTo(x, at + width), pen.lineTo(x + width, at);
  pen.stroke();
  pen.restore();
}

function outline(pen, b, cell, strong) {
  const x = columnLeft(b, cell.column), y = rowTop(b, cell.row);
  pen.lineWidth = strong ? 2 : 1;
  pen.strokeStyle = "#000";
  pen.strokeRect(x - 1.5, y - 1.5, b.cell + 3, b.tall + 3);
  pen.strokeStyle = "#fff";
  pen.strokeRect(x + 0.5, y + 0.5, b.cell - 1, b.tall - 1);
}

function rowAxis(pen, b) {
  pen.fillStyle = ink("--body-text-color-subdued");
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const every = [1, 2, 5, 10, 20, 50].find((n) => n * b.tall >= 13) || 100;
  for (let row = 0; row < data.rows; row += every) pen.fillText(row, LEFT - 5, rowTop(b, row) + b.tall / 2);
  pen.save();
  pen.translate(9, TOP + (data.rows * b.tall) / 2);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "center";
  pen.fillText(`${config.row} →`, 0, 0);
  pen.restore();
}

function columnAxis(pen, b) {
  const base = TOP + data.rows * b.tall;
  pen.textBaseline = "middle";
  for (let column = b.first; column < b.last; column++) {
    const middle = columnLeft(b, column) + b.cell / 2;
    const marked = selected && selected.column === column;
    pen.fillStyle = ink(marked ? "--body-text-color" : "--body-text-color-subdued");
    pen.font = `${marked ? "bold " : ""}10px ui-monospace, monospace`;
    if (b.cell >= 9) {
      pen.save();
      pen.translate(middle, base + 5);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "right";
      pen.fillText(clipped(data.tokens[column]), 0, 0);
      pen.restore();
    } else if (column % (b.cell >= 4 ? 20 : 50) === 0) {
      pen.textAlign = "center";
      pen.fillText(column, middle, base + 12);
    }
  }
}

// A space, a line end and a tab are seen.
const visible = (text) => text.replace(/ /g, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
function clipped(text) {
  const letters = Array.from(visible(text));
  return letters.length > 10 ? letters.slice(0, 9).join("") + "…" : letters.join("");
}

function gradient() {
  const colours = ramp(), stops = [];
  for (let i = 0; i <= 16; i++) {
    const step = 3 * Math.round((255 * i) / 16);
    stops.push(`rgb(${colours[step]},${colours[step + 1]},${colours[step + 2]})`);
  }
  return stops;
}

function legendTexts() {
  const { low, high } = range(null), logarithmic = view.log && !config.signed;
  const unit = `${config.unit}${logarithmic ? ", logarithmic" : ""}`;
  if (view.perRow && !config.signed) return ["lowest", "highest", `${unit}, each ${config.row} by itself`];
  return [config.signed ? number(-high) : number(logarithmic ? low : 0), number(high), unit];
}

function legend() {
  const [low, high, unit] = data.count ? legendTexts() : ["", "", config.unit];
  find("low").textContent = low;
  find("high").textContent = high;
  find("unit").textContent = unit;
  find("ramp").style.background = `linear-gradient(to right, ${gradient().join(",")})`;
}

const number = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(2) : Number(value.toPrecision(4)).toString());

// ---- selecting ---------------------------------------------------------------------------------------------------

function cellAt(event) {
  const bounds = canvas.getBoundingClientRect(), x = event.clientX - bounds.left, y = event.clientY - bounds.top;
  const b = box(scroller.clientWidth, scroller.clientHeight, view.width, scroller.scrollLeft);
  const column = Math.floor((x - LEFT + scroller.scrollLeft) / view.width);
  const row = data.rows - 1 - Math.floor((y - TOP) / b.tall);
  const inside = x >= LEFT && row >= 0 && row < data.rows && column >= 0 && column < data.count;
  return inside ? { row, column } : null;
}

function lines(cell) {
  const text = [`${config.column} ${cell.column} ${JSON.stringify(data.tokens[cell.column])}, ${config.row} ${cell.row}`];
  const values = config.points.map((point, i) => data.at(i, cell.row, cell.column));
  config.points.forEach((point, i) => {
    const share = i > 0 && config.share && values[0] > 0 ? `  (${Math.round((100 * values[i]) / values[0])} % of the stream)` : "";
    text.push(`${point.label}: ${number(values[i])}${share}`);
  });
  return text;
}

let triggering = null;
function select(cell, tell = true) {
  selected = cell;
  clearTimeout(triggering);
  find("live").textContent = cell ? lines(cell).join("; ") : "";
  if (cell && tell) {
    // Held arrow keys run over many cells; only where they rest is looked at.
    triggering = setTimeout(() => trigger("cell", { trace: data.trace, row: cell.row, column: cell.column }), 120);
  }
  redraw();
}

function move(rows, columns) {
  if (!data.count) return;
  const from = selected || { row: data.rows - 1 - (rows < 0 ? -1 : 0), column: data.count - (columns < 0 ? 0 : 1) };
  const clamp = (value, most) => Math.max(0, Math.min(most, value));
  const to = { row: clamp(from.row + rows, data.rows - 1), column: clamp(from.column + columns, data.count - 1) };
  const left = to.column * view.width, room = scroller.clientWidth - LEFT;
  if (left < scroller.scrollLeft) scroller.scrollLeft = left;
  if (left + view.width > scroller.scrollLeft + room) scroller.scrollLeft = left + view.width - room;
  select(to);
}

function describe() {
  const what = `${config.label}: ${config.points[view.point].label}, ${data.rows} ${config.row}s by ${data.count} ${config.column}s.`;
  const cell = selected ? ` Selected: ${lines(selected).join("; ")}.` : "";
  scroller.setAttribute("aria-label", `${what}${cell} Arrow keys select.`);
}

function zoom(factor) {
  const middle = (scroller.scrollLeft + scroller.clientWidth / 2) / view.width;
  view.width = Math.max(1, Math.min(48, view.width * factor));
  spacer.style.width = `${LEFT + data.count * view.width + 8}px`;
  if (!view.follow) scroller.scrollLeft = middle * view.width - scroller.clientWidth / 2;
  redraw();
}

const KEYS = {
  ArrowUp: () => move(1, 0), ArrowDown: () => move(-1, 0), ArrowLeft: () => move(0, -1), ArrowRight: () => move(0, 1),
  PageUp: () => move(0, -10), PageDown: () => move(0, 10), Home: () => move(0, -1e9), End: () => move(0, 1e9),
  "+": () => zoom(1.5), "-": () => zoom(1 / 1.5),
};

scroller.addEventListener("keydown", (event) => {
  const act = KEYS[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  event.stopPropagation();
  act();
});
canvas.addEventListener("click", (event) => {
  const cell = cellAt(event);
  if (cell) select(cell);
});
canvas.addEventListener("pointermove", (event) => {
  hovered = cellAt(event);
  tip.hidden = !hovered;
  if (hovered) {
    tip.textContent = lines(hovered).join("\n");
    const bounds = find("frame").getBoundingClientRect();
    const x = event.clientX - bounds.left, y = event.clientY - bounds.top;
    tip.style.left = `${x + tip.offsetWidth + 20 > bounds.width ? Math.max(0, x - tip.offsetWidth - 12) : x + 14}px`;
    tip.style.top = `${y + tip.offsetHeight + 20 > bounds.height ? Math.max(0, y - tip.offsetHeight - 12) : y + 14}px`;
  }
  redraw();
});
canvas.addEventListener("pointerleave", () => {
  hovered = null;
  tip.hidden = true;
  redraw();
});
scroller.addEventListener("scroll", () => {
  view.follow = scroller.scrollLeft + scroller.clientWidth >= scroller.scrollWidth - 2;
  redraw();
});

// ---- controls ----------------------------------------------------------------------------------------------------

function control(kind, text, title, checked, act) {
  const label = document.createElement("label"), input = document.createElement("input");
  Object.assign(input, { type: kind, checked });
  if (kind === "radio") input.name = `heat-${element.id}`;
  label.title = title;
  label.append(input, Object.assign(document.createElement("span"), { textContent: text }));
  input.addEventListener("change", () => { act(input.checked); redraw(); });
  return label;
}

function button(text, title, act) {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, title });
  made.setAttribute("aria-label", title);
  made.addEventListener("click", act);
  return made;
}

const title = document.createElement("div");

function controls() {
  const points = document.createElement("div"), switches = document.createElement("div"), tools = document.createElement("div");
  title.className = "heat-title";
  points.className = "heat-points";
  points.setAttribute("role", "radiogroup");
  points.setAttribute("aria-label", "What is drawn");
  if (P > 1) config.points.forEach((point, i) => points.append(control("radio", point.label, point.title, i === 0, () => { view.point = i; })));
  if (!config.signed) {
    switches.append(control("checkbox", "log", "Logarithmic scale", view.log, (on) => { view.log = on; }));
    switches.append(control("checkbox", `per ${config.row}`, `Each ${config.row} has a scale of its own`, false, (on) => { view.perRow = on; }));
  }
  if (config.hideFirst !== null) switches.append(control("checkbox", "hide first", "The first token dwarfs all others; hidden, it does not count for the scale", view.hideFirst, (on) => { view.hideFirst = on; }));
  tools.append(button("−", "Narrower columns (key -)", () => zoom(1 / 1.5)), button("+", "Wider columns (key +)", () => zoom(1.5)), button("PNG", "Save the whole picture as PNG", savePng));
  tools.className = "heat-tools";
  find("bar").append(P > 1 ? points : title, switches, tools);
  find("newest").addEventListener("click", () => { view.follow = true; redraw(); });
}

// The whole picture, not only what is in view; a canvas may be 16,384 pixels wide.
function savePng() {
  if (!data.count) return;
  const cell = Math.max(1, Math.min(view.width, Math.floor(15000 / data.count))), head = 44;
  const width = Math.max(420, LEFT + data.count * cell + 12), tall = Math.max(5, Math.round(420 / data.rows));
  const height = TOP + data.rows * tall + (cell >= 9 ? 72 : 22);
  const sheet = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * (height + head) });
  if (width > 8000) Object.assign(sheet, { width, height: height + head });
  const pen = sheet.getContext("2d");
  pen.scale(sheet.width / width, sheet.width / width);
  pen.fillStyle = ink("--body-background-fill");
  pen.fillRect(0, 0, width, height + head);
  pen.fillStyle = ink("--body-text-color");
  pen.font = "13px system-ui, sans-serif";
  pen.fillText([data.model, config.points[view.point].label].filter(Boolean).join(" · "), 10, 17);
  const [low, high, unit] = legendTexts(), stops = gradient();
  const fill = pen.createLinearGradient(60, 0, 180, 0);
  stops.forEach((stop, i) => fill.addColorStop(i / (stops.length - 1), stop));
  pen.font = "11px system-ui, sans-serif";
  pen.fillText(low, 10, 36);
  pen.fillText(`${high}  ${unit}`, 186, 36);
  pen.fillStyle = fill;
  pen.fillRect(60, 27, 120, 10);
  pen.translate(0, head);
  paint(pen, box(width, height, cell, 0));
  sheet.toBlob((blob) => {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `${config.file}.png` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

find("empty").textContent = config.empty;
controls();
new ResizeObserver(redraw).observe(scroller);
new MutationObserver(redraw).observe(document.body, { attributes: true, attributeFilter: ["class"] });
watch("value", () => receive(props.value));
receive(props.value);
redraw();
