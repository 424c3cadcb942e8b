// Part of heat.js: the values of the canvas, and their colour scale.

function receive(value) {
  if (!value) return;
  data.model = value.model || "";
  if (value.trace !== data.trace || value.layers !== data.rows) reset(value);
  // A selection that is being made in the page is newer than the server's.
  if (value.selected !== undefined && triggering === null) wanted = value.selected;
  if (value.from > data.count) return pull();
  if (value.from < data.count) truncate(value.from);
  append(value);
}

// Fetches missing rows (after a merged update, or in a tab that was opened late).
async function pull() {
  if (pulling) {
    again = true;
    return;
  }
  pulling = true;
  try {
    const value = await server.heat_rows({ trace: data.trace, from: data.count });
    // Another trace may have started meanwhile.
    if (value && value.trace === data.trace && value.from <= data.count) receive(value);
  } finally {
    pulling = false;
    if (again) {
      again = false;
      pull();
    }
  }
}

function reset(value) {
  Object.assign(data, { trace: value.trace, rows: value.layers, count: 0, tokens: [], ids: [] });
  data.values = new Float32Array(0);
  ranges = freshRanges();
  view.follow = config.follow;
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
  const needed = (start + added) * data.size;
  if (needed > data.values.length) {
    const grown = new Float32Array(Math.max(needed, 2 * data.values.length));
    grown.set(data.values.subarray(0, start * data.size));
    data.values = grown;
  }
  data.values.set(new Float32Array(raw.buffer), start * data.size);
  for (let i = 0; i < added; i++) {
    data.tokens.push(value.tokens[i]);
    data.ids.push(value.ids[i]);
  }
  data.count += added;
  measure(start);
  // Applies the server's selection once its token is here.
  if (wanted === null || (wanted && wanted[1] < data.count)) {
    select(wanted && { row: wanted[0], column: wanted[1] }, false);
    wanted = undefined;
  }
  redraw();
}

// Smallest positive and largest magnitude of each (point, row). The first token is separate: it dwarfs all others.
function freshRanges() {
  const size = data.size;
  return { low: new Float32Array(size).fill(Infinity), high: new Float32Array(size), first: new Float32Array(size) };
}

function measure(start) {
  const size = data.size;
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

// The ends of the scale for one row, or for all rows of the point.
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

// The place on the colour scale, 0 to 1; NaN if there is nothing to draw.
function level(value, ends) {
  if (!Number.isFinite(value)) return NaN;
  if (config.signed) return ends.high ? 0.5 + value / (2 * ends.high) : 0.5;
  if (!view.log) return ends.high ? value / ends.high : NaN;
  if (!(value > 0)) return NaN;
  return ends.high > ends.low ? Math.log(value / ends.low) / Math.log(ends.high / ends.low) : 1;
}
