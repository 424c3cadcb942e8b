// The heat map. Gradio runs this once per component, with element, trigger, props, server and watch in scope;
// heat_map.py puts config before it.
// Values are token-major, [token][point][row], so that a new token is appended; rows are layers (or heads).

const P = config.points.length;
const find = (name) => element.querySelector(`.heat-${name}`);
const scroller = find("scroll"), spacer = find("spacer"), canvas = find("canvas"), tip = find("tip");
const ramps = Object.fromEntries(Object.entries(config.ramps).map(([name, text]) => [name, bytes(text)]));

const data = { trace: null, model: "", rows: 0, count: 0, shown: 0, values: new Float32Array(0), tokens: [], ids: [] };
data.at = (point, row, column) => data.values[(column * P + point) * data.rows + row];
Object.defineProperty(data, "size", { get: () => P * data.rows }); // number of values per token
const view = { point: 0, log: config.log, perRow: false, hideFirst: Boolean(config.hideFirst), width: 12, follow: config.follow };
let selected = null, wanted, triggering = null, hovered = null, pulling = false, again = false, dirty = false, drawn = 0, ranges = null;
element.heatData = data;
element.heatView = view;

function bytes(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}
