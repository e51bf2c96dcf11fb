// The page: which charts there are, and what the controls, the legend, the pointer and the arrow keys do.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const AXES = {
  tokens: { name: "tokens", says: (x) => short(x) },
  step: { name: "steps", says: (x) => Math.round(x).toLocaleString("en") },
  seconds: { name: "of training time", says: duration },
};
const control = { axis: "tokens", smooth: 4, from: 0, log: false, hidden: new Set() };
const shownRuns = () => RUNS.map((run, number) => ({ run, number })).filter(({ number }) => !control.hidden.has(number));

/** The span of the chosen axis over all runs (hidden ones too, so that nothing jumps), and its words. */
function currentView() {
  const places = RUNS.flatMap((run) => [...run.x[control.axis].slice(-1), ...run.validation.x[control.axis].slice(-1)]);
  const high = Math.max(...places, 0) || 1, axis = AXES[control.axis];
  const low = (high * control.from) / 100;
  const width = 0.0005 * control.smooth ** 2; // the slider is fine where smoothing is slight: 0 to 20 %
  const [unit, unitName] = control.axis === "seconds" ? durationUnit(high) : [1, ""];
  return { axis: control.axis, low, high, unit, unitName, log: control.log, tau: width * high, says: axis.says, axisName: axis.name };
}

/** The layer of one measured quantity of one run. */
function layerOf(run, number, name, view, plain) {
  const x = run.x[view.axis], { mean, least, greatest } = run.curves[name];
  const y = plain ? mean : smoothed(x, mean, view.tau);
  return { run: number, name: run.name, x, y, raw: y === mean ? null : mean, least, greatest };
}

function validationOf(run, number, view) {
  return { run: number, name: run.name, x: run.validation.x[view.axis], y: run.validation.mean, sparse: true };
}

/** How far a run's curve lies above the first run's, in percent, at equal tokens whatever the axis shows. */
function gapOf(layer, tokens, reference, referenceTokens, view) {
  const raw = layer.x.map((_, i) => {
    const own = (layer.raw || layer.y)[i];
    const base = valueAt(referenceTokens, reference.raw || reference.y, tokens[i], layer.sparse);
    return base === null || own === null || base === 0 ? null : (100 * (own - base)) / base;
  });
  return { ...layer, y: layer.sparse ? raw : smoothed(layer.x, raw, view.tau), raw: null, least: null, greatest: null };
}

const all = (name, plain) => (view) => shownRuns().map(({ run, number }) => layerOf(run, number, name, view, plain));
const gaps = (of, places) => (view) => {
  const first = of(RUNS[0], 0, view);
  const others = shownRuns().filter(({ number }) => number > 0);
  return others.map(({ run, number }) => gapOf(of(run, number, view), places(run), first, places(RUNS[0]), view));
};
const trainOf = (run, number, view) => layerOf(run, number, "loss", view);
const across = (words) => (view) => `${words}, across ${view.axisName.replace("of ", "")}`;
const four = (value) => value.toFixed(4), percent = (value) => `${signed(value.toFixed(2))} %`;
/** A number's text with its sign; what rounds to zero has none. */
const signed = (text) => (Number.parseFloat(text) === 0 ? text.replace("-", "") : text.startsWith("-") ? text : `+${text}`);
const numbered = { tick: short, format: (value) => short(value) };
const inPercent = { tick: (value, ...scale) => `${signed(short(value, ...scale))} %`, format: percent, zero: true };
const speedNote = RUNS.some((run) => run.emulated) ? " (an emulated speed is not its formats' own)" : "";

const SPECS = [
  { id: "train", title: "Train loss", wide: true, log: true, layers: all("loss"), subtitle: across("nats a token"), ...numbered, format: four },
  { id: "val", title: "Validation loss", log: true, layers: (view) => shownRuns().map(({ run, number }) => validationOf(run, number, view)), subtitle: across("nats a token"), ...numbered, format: four },
  { id: "val-gap", title: `Validation gap to ${RUNS[0].name}`, layers: gaps(validationOf, (run) => run.validation.x.tokens), subtitle: across("percent at equal tokens"), ...inPercent },
  { id: "gap", title: `Train gap to ${RUNS[0].name}`, layers: gaps(trainOf, (run) => run.x.tokens), subtitle: across("percent at equal tokens, smoothed"), ...inPercent },
  { id: "norm", title: "Gradient norm", log: true, layers: all("grad_norm"), subtitle: across("before clipping"), ...numbered },
  { id: "lr", title: "Learning rate", layers: all("lr", true), subtitle: across("schedule"), ...numbered },
  { id: "speed", title: "Tokens per second", layers: all("tokens_per_s"), subtitle: (view) => across("all ranks")(view) + speedNote, ...numbered },
];

function start() {
  document.querySelectorAll(".key").forEach((key) => swatch(Number(key.dataset.run), key));
  const host = document.querySelector(".charts");
  if (!host) return;
  const charts = [];
  for (const spec of SPECS) {
    charts.push(makeChart(host, spec));
    if (spec.id === "train") charts.push(makeTimeline(host, shownRuns));
  }
  const redraw = () => { const view = currentView(); charts.forEach((chart) => chart.draw(view)); };
  charts.forEach((chart) => followPointer(chart, charts));
  wireControls(redraw);
  wireLegend(redraw);
  redraw();
  let width = host.clientWidth;
  new ResizeObserver(() => { if (host.clientWidth !== width) { width = host.clientWidth; redraw(); } }).observe(host);
}

/** One crosshair through all charts; the chart under the pointer or the focus says the values. */
function followPointer(chart, charts) {
  let at = null;
  const show = (x) => { at = x; charts.forEach((other) => other.point(x, other === chart)); };
  const under = (event) => {
    const { view, width } = chart.frame(), { left, right } = chart.margin;
    const share = (event.clientX - chart.drawing.getBoundingClientRect().left - left) / (width - left - right);
    return view.low + Math.min(1, Math.max(0, share)) * (view.high - view.low);
  };
  chart.plot.addEventListener("pointermove", (event) => show(under(event)));
  chart.plot.addEventListener("pointerdown", (event) => show(under(event)));
  chart.plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") show(null); });
  chart.plot.addEventListener("blur", () => show(null));
  chart.plot.addEventListener("keydown", (event) => {
    const { view } = chart.frame(), stride = (view.high - view.low) / (event.shiftKey ? 20 : 200);
    const from = at === null ? view.high : at;
    const to = { ArrowLeft: from - stride, ArrowRight: from + stride, Home: view.low, End: view.high }[event.key];
    if (event.key === "Escape") show(null);
    if (to === undefined) return;
    event.preventDefault();
    show(Math.min(view.high, Math.max(view.low, to)));
  });
}

function wireControls(redraw) {
  const panel = document.querySelector(".controls");
  const says = () => {
    document.getElementById("smooth-says").textContent = control.smooth ? `${+(0.05 * control.smooth ** 2).toFixed(2)} %` : "off";
    document.getElementById("from-says").textContent = control.from ? `${control.from} %` : "no";
  };
  // A browser may restore the controls of an earlier visit: read them, do not assume.
  const read = () => {
    control.axis = panel.querySelector("input[name=axis]:checked").value;
    control.smooth = Number(document.getElementById("smooth").value);
    control.from = Number(document.getElementById("from").value);
    control.log = document.getElementById("log").checked;
    says();
  };
  panel.addEventListener("input", () => { read(); redraw(); });
  panel.hidden = false;
  read();
}

function wireLegend(redraw) {
  const legend = document.querySelector(".legend");
  legend.hidden = RUNS.length < 2;
  RUNS.forEach((run, number) => {
    const button = make("button", { type: "button", "aria-pressed": "true" }, legend);
    swatch(number, button);
    make("span", {}, button, run.name);
    button.addEventListener("click", () => {
      const on = control.hidden.delete(number);
      if (!on) control.hidden.add(number);
      button.setAttribute("aria-pressed", String(on));
      redraw();
    });
  });
}

start();
