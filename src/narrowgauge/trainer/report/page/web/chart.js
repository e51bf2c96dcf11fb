// The two kinds of charts, curves and the time line of events. Pure functions first, drawing after.

/**
 * Two-sided exponential smoothing with width `tau` in units of x: no lag, right for uneven spacing.
 * Each value is a mean of all values, weighted by exp(-distance / tau); holes stay holes.
 */
function smoothed(x, y, tau) {
  if (!(tau > 0)) return y;
  const sweep = (order) => {
    const sums = new Array(x.length), weights = new Array(x.length);
    let sum = 0, weight = 0, last = null;
    for (const i of order) {
      const decay = last === null ? 0 : Math.exp(-Math.abs(x[i] - last) / tau);
      sum = sum * decay + (y[i] === null ? 0 : y[i]);
      weight = weight * decay + (y[i] === null ? 0 : 1);
      [sums[i], weights[i], last] = [sum, weight, x[i]];
    }
    return [sums, weights];
  };
  const forward = [...x.keys()];
  const [a, u] = sweep(forward), [b, v] = sweep(forward.slice().reverse());
  return y.map((value, i) => (value === null ? null : (a[i] + b[i] - value) / (u[i] + v[i] - 1)));
}

/** Index of the point nearest to `at` in the ascending list `x`; -1 where it is empty. */
function nearest(x, at) {
  const next = x.findIndex((value) => value >= at);
  if (next < 0) return x.length - 1;
  return next > 0 && at - x[next - 1] < x[next] - at ? next - 1 : next;
}

/** The curve (x, y) at `at`, by straight lines unless only its own points count; null outside and beside holes. */
function valueAt(x, y, at, exact) {
  const i = nearest(x, at);
  if (i < 0 || x[i] === at) return i < 0 ? null : y[i];
  const j = x[i] < at ? i + 1 : i - 1;
  if (exact || j < 0 || j >= x.length || y[i] === null || y[j] === null) return null;
  return y[i] + ((y[j] - y[i]) * (at - x[i])) / (x[j] - x[i]);
}

/** The path through the points; holes lift the pen, and a point alone between holes is a dot. */
function trace(x, y, px, py) {
  let path = "", down = false;
  for (let i = 0; i < x.length; i++) {
    if (y[i] === null || !isFinite(py(y[i]))) { down = false; continue; }
    path += `${down ? "L" : "M"}${px(x[i]).toFixed(1)} ${py(y[i]).toFixed(1)}${down ? "" : "h.01"}`;
    down = true;
  }
  return path;
}

/** The area between the least and greatest values. */
function band(x, least, greatest, px, py) {
  const at = [...x.keys()].filter((i) => least[i] !== null && isFinite(py(least[i])));
  if (!at.length) return "";
  const point = (i, y) => `${px(x[i]).toFixed(1)} ${py(y[i]).toFixed(1)}`;
  return `M${at.map((i) => point(i, greatest)).join("L")}L${at.reverse().map((i) => point(i, least)).join("L")}Z`;
}

/** Least and greatest of what can be seen, with a little air; the positive part alone on a log scale. */
function extent(layers, from, log) {
  const isSeen = (layer) => (value, i) => value !== null && layer.x[i] >= from && !(log && value <= 0);
  const seen = layers.flatMap((layer) => [layer.y, layer.raw, layer.least, layer.greatest].flatMap((values) => (values || []).filter(isSeen(layer))));
  const low = seen.reduce((a, b) => Math.min(a, b), Infinity), high = seen.reduce((a, b) => Math.max(a, b), -Infinity);
  if (low > high) return [log ? 0.1 : 0, 1];
  if (low === high) return log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(high) || 1) * 0.05];
  const air = log ? (high / low) ** 0.04 : (high - low) * 0.05;
  return log ? [low / air, high * air] : [low - air, high + air];
}

/** Where markers sit: on every point if they are few or have room, else some 180 pixels apart, staggered by run. */
function markedPoints(layer, px, low) {
  const seen = layer.x.filter((x) => x >= low).length;
  const room = seen < 2 ? Infinity : (px(layer.x[layer.x.length - 1]) - px(Math.max(low, layer.x[0]))) / (seen - 1);
  const isShort = layer.y.filter((value) => value !== null).length < 8; // a point alone is no line
  const apart = isShort || (layer.sparse && room > 14) ? 0 : 180;
  let next = apart ? px(low) + 40 + ((layer.look * 47) % 180) : -Infinity;
  return [...layer.x.keys()].filter((i) => {
    const x = layer.x[i], isMarked = !(x < low || layer.y[i] === null || px(x) < next);
    if (isMarked) next = px(x) + apart;
    return isMarked;
  });
}

/** A marker of a variant at a place. */
const mark = (look, x, y, parent, classes = "marker") => make("path", { d: shape(look), class: classes, transform: `translate(${x} ${y})` }, parent);

/** A row of a read-out: a variant's swatch, and a name. */
function rowOf(readout, look, name) {
  const line = make("div", { class: "row" }, readout);
  swatch(look, line);
  make("span", { class: "name" }, line, name);
  return line;
}

/** Curves: of `layers(view)`, each of one run or the mean of some. */
const CURVES = {
  kind: "", margin: { left: 58, right: 14, top: 10, bottom: 24 }, top: 10,
  height: (width) => (width < 480 ? 210 : 260),

  shown(view) {
    const layers = this.layers(view);
    return layers.some((layer) => layer.y.some((value) => value !== null)) ? layers : [];
  },

  keys: ({ frame }) => [...new Set(frame.shown.map((layer) => layer.look))].map((look) => ({ look, name: VARIANTS[look] })),

  /** The numbers, not smoothed: a row for each point of each run. */
  rows({ frame: { shown } }) {
    const ends = shown.some((layer) => layer.least) ? ["least", "greatest"] : [];
    const rows = shown.flatMap((layer) => layer.values.map((value, i) => [
      layer.name, layer.at.step[i], layer.at.tokens[i], layer.at.seconds[i], value, ...ends.map((end) => layer[end]?.[i]),
    ]));
    return [["run", "step", "tokens", "seconds", this.id, ...ends], ...rows.filter((row) => row[4] !== null)];
  },

  paint(own, { view, shown, px }) {
    const { drawing, width, height, margin } = own, log = this.log && view.log, [low, high] = extent(shown, view.low, log);
    const scale = log ? Math.log : (value) => value, room = height - margin.top - margin.bottom;
    const py = (y) => height - margin.bottom - ((scale(y) - scale(low)) / (scale(high) - scale(low))) * room;
    own.frame.py = py;
    own.about.textContent = this.subtitle(view);
    drawAcross(drawUp(own, (log ? logTicks : linearTicks)(low, high, 5), py, this), own);
    const clip = make("clipPath", { id: `clip-${this.id}` }, drawing);
    make("rect", { x: margin.left, y: margin.top - 6, width: width - margin.left - margin.right + 6, height: room + 8 }, clip);
    const area = make("g", { "clip-path": `url(#clip-${this.id})` }, drawing);
    for (const layer of shown) {
      const group = make("g", { class: shade(layer.look) }, area);
      if (layer.least) make("path", { d: band(layer.x, layer.least, layer.greatest, px, py), class: "band" }, group);
      if (layer.raw) make("path", { d: trace(layer.x, layer.raw, px, py), class: "raw" }, group);
    }
    // The first variant is drawn last, on top: it is what the others are compared with.
    for (const layer of [...shown].reverse()) {
      const group = make("g", { class: shade(layer.look) }, area);
      make("path", { d: trace(layer.x, layer.y, px, py), class: "line", "stroke-dasharray": dash(layer.look) }, group);
      for (const i of markedPoints(layer, px, view.low)) mark(layer.look, px(layer.x[i]), py(layer.y[i]), group);
    }
  },

  tell({ readout, frame: { view, shown, px, py } }, x, { at, cross, say }) {
    const near = shown.map((layer) => [layer, nearest(layer.x, x)]);
    const rows = near.filter(([layer, i]) => i >= 0 && layer.y[i] !== null && Math.abs(px(layer.x[i]) - at) <= 24);
    for (const [{ look, x, y }, i] of rows) mark(look, px(x[i]), py(y[i]), cross, `marker ${shade(look)}`);
    if (!say || !rows.length) return false;
    make("div", { class: "muted where" }, readout, `${view.says(x)} ${view.axisName}`);
    if (rows.some(([layer]) => layer.raw)) make("div", { class: "muted both" }, readout, "smoothed, measured");
    for (const [layer, i] of rows) {
      const line = rowOf(readout, layer.look, layer.name);
      make("span", { class: "value" }, line, this.format(layer.y[i]));
      make("span", { class: "muted" }, line, layer.raw && layer.raw[i] !== null ? this.format(layer.raw[i]) : "");
    }
    return true;
  },
};

const LANE = 22;
const eventMark = (kind, classes, x, y, parent) => make("path", { d: EVENT_SHAPES[kind] || OTHER_EVENT, class: classes, transform: `translate(${x} ${y})` }, parent);

/** The time line: one lane a run, a mark an event. */
const EVENTS = {
  title: "Events", kind: "events", margin: { left: 58, right: 14, top: 6, bottom: 24 }, top: 0,
  height: (_, runs) => 6 + LANE * runs.length + 24,
  shown: () => shownRuns().filter((run) => run.events.length),
  keys: ({ frame }) => frame.shown.map((run) => ({ look: run.variant, name: run.name })),

  rows({ frame }) {
    const rows = frame.shown.flatMap((run) => run.events.map((e) => [run.name, e.x.step, e.x.tokens, e.x.seconds, e.kind, e.reason]));
    return [["run", "step", "tokens", "seconds", "event", "reason"], ...rows];
  },

  paint(own, { view, shown, px }) {
    const { drawing, about, width, margin } = own;
    drawAcross(make("g", { class: "grid" }, drawing), own);
    shown.forEach((run, i) => {
      const group = make("g", { class: `lane ${shade(run.variant)}` }, drawing), y = margin.top + LANE * (i + 0.5);
      make("path", { d: `M${margin.left} ${y}H${width - margin.right}`, class: "rail" }, group);
      mark(run.variant, margin.left - 20, y, group);
      for (const { kind, x: { [view.axis]: x } } of run.events)
        if (x >= view.low && x <= view.high) eventMark(kind, `event ${kind === "save" ? "small" : ""}`, px(x), y, group);
    });
    about.className = "muted keys";
    about.replaceChildren();
    for (const kind of new Set(shown.flatMap((run) => run.events.map((event) => event.kind)))) {
      const key = make("span", { class: "key-of-event" }, about);
      eventMark(kind, "event", 7, 7, make("svg", { width: 14, height: 14, "aria-hidden": "true" }, key));
      make("span", {}, key, kind);
    }
  },

  tell({ readout, frame: { view, shown, px } }, _, { at, say }) {
    if (!say) return false;
    const near = shown.flatMap((run) => run.events.filter((e) => Math.abs(px(e.x[view.axis]) - at) < 7).slice(0, 4).map((event) => ({ run, event })));
    for (const { run, event } of near.slice(0, 12)) {
      const line = rowOf(readout, run.variant, `${run.name}: ${event.kind} at step ${event.x.step.toLocaleString("en")}`);
      if (event.reason) make("span", { class: "muted" }, line, event.reason);
    }
    return near.length > 0;
  },
};
