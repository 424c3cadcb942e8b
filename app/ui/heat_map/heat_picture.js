// Part of heat.js: draws the picture, its axes and its legend.

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
  find("newest").hidden = view.follow || !config.follow;
  if (data.count) paint(pen, box(width, height, view.width, scroller.scrollLeft));
  if (data.count !== drawn) data.shown += 1; // counts pictures with new values, for the tests
  drawn = data.count;
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

// Layer 0 is at the bottom: the residual stream flows upwards.
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

// Makes spaces, line ends and tabs visible.
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
