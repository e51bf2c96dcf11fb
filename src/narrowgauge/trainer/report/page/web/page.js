// The page: which charts there are, and what the controls, the legend, the pointer and the arrow keys do.

const DATA = JSON.parse(document.getElementById("data").textContent), RUNS = DATA.runs, VARIANTS = DATA.variants;
const AXES = {
  tokens: { name: "tokens", says: (x) => short(x) },
  step: { name: "steps", says: (x) => Math.round(x).toLocaleString("en") },
  seconds: { name: "of training time", says: duration },
};
const control = { axis: "tokens", smooth: 4, from: 0, log: false, hidden: new Set() };
const shownRuns = () => RUNS.filter((run) => !control.hidden.has(run.variant));

/** The span of the chosen axis over all runs (hidden ones too, so that nothing jumps), and its words. */
function currentView() {
  const places = RUNS.flatMap((run) => [run.end[control.axis], ...run.validation.x[control.axis].slice(-1)]);
  const high = Math.max(...places, 0) || 1, axis = AXES[control.axis];
  const low = (high * control.from) / 100;
  const width = 0.0005 * control.smooth ** 2; // the slider is fine where smoothing is slight: 0 to 20 %
  const [unit, unitName] = control.axis === "seconds" ? durationUnit(high) : [1, ""];
  return { axis: control.axis, low, high, unit, unitName, log: control.log, tau: width * high, says: axis.says, axisName: axis.name };
}

/** The layer of one measured quantity of one run: `values` as measured, `y` as drawn; validations are few, and not smoothed. */
function layerOf(run, name, view) {
  const sparse = name === "val_loss", { x: at, mean, least, greatest } = sparse ? run.validation : { x: run.x, ...run.curves[name] };
  const x = at[view.axis], y = sparse || name === "lr" ? mean : smoothed(x, mean, view.tau);
  return { look: run.variant, name: run.name, at, x, y, values: mean, raw: y === mean ? null : mean, least, greatest, sparse };
}

/** How far a run's curve lies above that of the reference with its seed, in percent, at equal tokens whatever the axis. */
function gapOf(layer, reference) {
  const values = layer.values.map((own, i) => {
    const base = valueAt(reference.at.tokens, reference.values, layer.at.tokens[i], layer.sparse);
    return base === null || own === null || base === 0 ? null : (100 * (own - base)) / base;
  });
  return { ...layer, values, raw: null, least: null, greatest: null };
}

/** The mean of the gaps of several seeds, where all have one, and their range. */
function meanOfSeeds(layers) {
  const [first, ...others] = layers;
  if (!others.length) return first;
  const at = others.map((layer) => new Map(layer.at.tokens.map((tokens, i) => [tokens, layer.values[i]])));
  const points = first.values.map((value, i) => [value, ...at.map((found) => found.get(first.at.tokens[i]) ?? null)]);
  const over = (of) => points.map((found) => (found.includes(null) ? null : of(found)));
  return {
    ...first, name: VARIANTS[first.look], values: over((found) => found.reduce((a, b) => a + b) / found.length),
    least: over((found) => Math.min(...found)), greatest: over((found) => Math.max(...found)),
  };
}

const all = (name) => (view) => shownRuns().map((run) => layerOf(run, name, view));
const gaps = (name) => (view) => VARIANTS.flatMap((_, variant) => {
  const paired = shownRuns().filter((run) => run.variant === variant && run.reference !== null);
  if (!paired.length) return [];
  const layer = meanOfSeeds(paired.map((run) => gapOf(layerOf(run, name, view), layerOf(RUNS[run.reference], name, view))));
  const smooth = (values) => values && (layer.sparse ? values : smoothed(layer.x, values, view.tau));
  return [{ ...layer, y: smooth(layer.values), least: smooth(layer.least), greatest: smooth(layer.greatest) }];
});
const across = (words) => (view) => `${words}, across ${view.axisName.replace("of ", "")}`;
/** A number's text with its sign; what rounds to zero has none. */
const signed = (text) => (Number.parseFloat(text) === 0 ? text.replace("-", "") : text.startsWith("-") ? text : `+${text}`);
const four = (value) => value.toFixed(4), percent = (value) => `${signed(value.toFixed(2))} %`;
const numbered = { tick: short, format: (value) => short(value) };
const inPercent = { tick: (value, ...scale) => `${signed(short(value, ...scale))} %`, format: percent, zero: true };
const speedNote = () => (RUNS.some((run) => run.emulated) ? "; emulated: not the formats' own" : "");
const gapNote = () => (RUNS.length > VARIANTS.length ? "percent, mean and range over seeds" : "percent at equal tokens");

const SPECS = [
  { id: "val_loss", title: "Validation loss", log: true, layers: all("val_loss"), subtitle: across("nats a token"), ...numbered, format: four },
  { id: "val_gap", title: `Validation gap to ${VARIANTS[0]}`, layers: gaps("val_loss"), subtitle: gapNote, ...inPercent },
  { id: "loss", title: "Train loss", log: true, layers: all("loss"), subtitle: across("nats a token"), ...numbered, format: four },
  { id: "gap", title: `Train gap to ${VARIANTS[0]}`, layers: gaps("loss"), subtitle: () => `${gapNote()}, smoothed`, ...inPercent },
];
const REST = [
  { id: "grad_norm", title: "Gradient norm", log: true, layers: all("grad_norm"), subtitle: across("before clipping"), ...numbered },
  { id: "lr", title: "Learning rate", layers: all("lr"), subtitle: across("schedule"), ...numbered },
  { id: "tokens_per_s", title: "Tokens per second", layers: all("tokens_per_s"), subtitle: (view) => across("all ranks")(view) + speedNote(), ...numbered },
];

/** Draws all charts. */
function start() {
  document.querySelectorAll(".key").forEach((key) => swatch(Number(key.dataset.look), key));
  const host = document.getElementById("charts"), rest = document.getElementById("rest");
  if (!host) return;
  rest.closest("section").hidden = false;
  const curvesIn = (place, specs) => specs.map((spec) => makeChart(make("div", { class: "chart" }, place), { ...CURVES, ...spec }));
  const first = curvesIn(host, SPECS), events = makeChart(make("div", { class: "chart wide" }, host), EVENTS);
  const charts = [...first, events, ...curvesIn(rest, REST)];
  const redraw = () => {
    const view = currentView();
    charts.forEach((chart) => chart.draw(view));
    const seen = first.filter(({ figure }) => !figure.hidden);
    first.forEach((chart) => chart.figure.classList.toggle("wide", seen.length === 1 && chart === seen[0]));
  };
  charts.forEach((chart) => followPointer(chart, charts));
  wireControls(redraw);
  fillLegend(redraw);
  redraw();
}

/** What the controls say; a browser may restore those of an earlier visit, so they are read. */
function wireControls(redraw) {
  const panel = document.querySelector(".controls"), node = (id) => document.getElementById(id);
  const read = () => {
    const smooth = Number(node("smooth").value), from = Number(node("from").value);
    Object.assign(control, { axis: panel.querySelector("input[name=axis]:checked").value, smooth, from, log: node("log").checked });
    node("smooth-says").textContent = smooth ? `${+(0.05 * smooth ** 2).toFixed(2)} %` : "off";
    node("from-says").textContent = from ? `${from} %` : "no";
  };
  panel.addEventListener("input", () => { read(); redraw(); });
  panel.hidden = false;
  read();
}

function fillLegend(redraw) {
  const legend = document.querySelector(".legend");
  legend.hidden = VARIANTS.length < 2;
  VARIANTS.forEach((name, number) => {
    const button = make("button", { type: "button", "aria-pressed": "true" }, legend);
    swatch(number, button);
    make("span", {}, button, name);
    button.addEventListener("click", () => {
      const on = control.hidden.delete(number);
      if (!on) control.hidden.add(number);
      button.setAttribute("aria-pressed", String(on));
      redraw();
    });
  });
}

start();
