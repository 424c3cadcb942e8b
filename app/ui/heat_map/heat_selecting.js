// Part of heat.js: pointer and key events, the selected cell, zooming and scrolling.

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

function select(cell, notify = true) {
  selected = cell;
  clearTimeout(triggering);
  triggering = null;
  find("live").textContent = cell ? lines(cell).join("; ") : "";
  if (cell && notify) {
    // A held arrow key passes many cells: only the last one is sent to the server.
    triggering = setTimeout(() => {
      triggering = null;
      trigger("cell", { trace: data.trace, row: cell.row, column: cell.column });
    }, 120);
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
  if (config.group) syncGroup();
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
  view.follow = config.follow && scroller.scrollLeft + scroller.clientWidth >= scroller.scrollWidth - 2;
  if (config.group) syncGroup();
  redraw();
});

// Heat maps of one group show the same columns. The scroll event that this causes in another one changes nothing more.
function syncGroup() {
  document.dispatchEvent(new CustomEvent("heatmove", { detail: { group: config.group, left: scroller.scrollLeft, width: view.width } }));
}
if (config.group) document.addEventListener("heatmove", function moved({ detail }) {
  if (!element.isConnected) return document.removeEventListener("heatmove", moved);
  if (detail.group !== config.group) return;
  if (view.width !== detail.width) {
    view.width = detail.width;
    spacer.style.width = `${LEFT + data.count * view.width + 8}px`;
    redraw();
  }
  if (Math.abs(scroller.scrollLeft - detail.left) >= 1) scroller.scrollLeft = detail.left;
});
