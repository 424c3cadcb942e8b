// Part of heat.js: the switches above the picture, saving it as a file, and the start-up code.

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

// Saves the whole picture, not only the visible part; a canvas may be at most 16,384 pixels wide.
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
new MutationObserver((_, observer) => (element.isConnected ? redraw() : observer.disconnect())).observe(document.body, {
  attributes: true, attributeFilter: ["class"], // light or dark
});
watch("value", () => receive(props.value));
receive(props.value);
redraw();
