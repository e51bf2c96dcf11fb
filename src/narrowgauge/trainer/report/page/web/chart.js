// One chart: curves over a common axis, a crosshair, a read-out. Pure functions first, drawing after.

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

/** A chart in `host`. `spec` says what it shows; `draw(view)` is called whenever the view changes. */
function makeChart(host, spec) {
  const keys = () => [...new Map(frame.layers.map((layer) => [layer.look, { look: layer.look, name: VARIANTS[layer.look] }])).values()];
  const own = makePlot(make("div", { class: "chart" }, host), spec.title, "", keys, () => pointsOf(frame.layers, spec.id));
  const { figure, about, plot, drawing, readout } = own, margin = { left: 58, right: 14, top: 10, bottom: 24 };
  let frame = null; // what the last drawing was: its scales and layers

  function draw(view) {
    const layers = spec.layers(view);
    figure.hidden = !layers.some((layer) => layer.y.some((value) => value !== null));
    readout.hidden = true;
    if (figure.hidden) return;
    about.textContent = spec.subtitle(view);
    const { width, height } = own.clear((width) => (width < 480 ? 210 : 260));
    const log = spec.log && view.log, [low, high] = extent(layers, view.low, log);
    const scale = log ? Math.log : (value) => value;
    const px = acrossOf(view, width, margin); // of the margin as it is when called: drawGrid may widen it
    const py = (y) => height - margin.bottom - ((scale(y) - scale(low)) / (scale(high) - scale(low))) * (height - margin.top - margin.bottom);
    frame = { view, layers, px, py, width, height };
    drawGrid(drawing, { low, high, log, view, px, py, width, height, margin, spec });
    drawLayers(drawing, { layers, px, py, width, height, margin, view, id: spec.id });
  }

  /** Move the crosshair to `x` (null takes it away); say the values only where `say` is true. */
  function point(x, say) {
    if (!frame || figure.hidden) return;
    const at = x === null ? null : frame.px(x), cross = own.cross(at, margin.top, frame.height - margin.bottom), rows = [];
    if (x === null) return;
    for (const layer of frame.layers) {
      const i = nearest(layer.x, x);
      if (i < 0 || layer.y[i] === null || Math.abs(frame.px(layer.x[i]) - at) > 24) continue;
      make("path", { d: shape(layer.look), class: `marker ${shade(layer.look)}`, transform: `translate(${frame.px(layer.x[i])} ${frame.py(layer.y[i])})` }, cross);
      rows.push([layer, i]);
    }
    if (!say || !rows.length) return;
    make("div", { class: "muted where" }, readout, `${frame.view.says(x)} ${frame.view.axisName}`);
    if (rows.some(([layer]) => layer.raw)) make("div", { class: "muted both" }, readout, "smoothed, measured");
    for (const [layer, i] of rows) {
      const line = make("div", { class: "row" }, readout);
      swatch(layer.look, line);
      make("span", { class: "name" }, line, layer.name);
      make("span", { class: "value" }, line, spec.format(layer.y[i]));
      make("span", { class: "muted" }, line, layer.raw && layer.raw[i] !== null ? spec.format(layer.raw[i]) : "");
    }
    placeReadout(readout, plot, at, frame.height + 4, margin.top);
  }

  return { ...own, draw, point, margin, frame: () => frame };
}
