// What a chart is made of: the grid with its numbers, the curves, the time line of events.

/** Makes the left margin as wide as the numbers need: a sign that is cut off would be read as its opposite. */
function drawGrid(drawing, { low, high, log, view, px, py, width, height, margin, spec }) {
  const grid = make("g", { class: "grid" }, drawing);
  const rows = log ? logTicks(low, high, 5) : linearTicks(low, high, 5);
  const largest = rows.step ? Math.max(...rows.ticks.map(Math.abs)) : 0;
  const numbers = rows.ticks.map((at) => make("text", { y: py(at) + 4, "text-anchor": "end" }, grid, spec.tick(at, rows.step, largest)));
  margin.left = Math.max(margin.left, 12 + Math.max(...numbers.map((number) => number.getComputedTextLength())));
  for (const number of numbers) number.setAttribute("x", margin.left - 8);
  for (const at of rows.ticks) make("path", { d: `M${margin.left} ${py(at)}H${width - margin.right}`, class: at === 0 && spec.zero ? "zero" : "" }, grid);
  drawAcross(grid, { view, px, width, height, margin });
}

/** The numbers along the lower edge; those that would be cut off are left out. */
function drawAcross(grid, { view, px, width, height, margin }) {
  const wanted = Math.max(2, Math.floor((width - margin.left) / 58));
  const { ticks, step } = linearTicks(view.low / view.unit, view.high / view.unit, wanted);
  for (const tick of ticks) {
    const at = tick * view.unit;
    if (px(at) > width - 24 || px(at) < margin.left - 1) continue;
    make("path", { d: `M${px(at)} ${height - margin.bottom}v4`, class: "tick" }, grid);
    make("text", { x: px(at), y: height - margin.bottom + 17, "text-anchor": "middle" }, grid, short(tick, step, ticks[ticks.length - 1]) + view.unitName);
  }
}

function drawLayers(drawing, { layers, px, py, width, height, margin, view, id }) {
  const clip = make("clipPath", { id: `clip-${id}` }, drawing);
  make("rect", { x: margin.left, y: margin.top - 6, width: width - margin.left - margin.right + 6, height: height - margin.top - margin.bottom + 8 }, clip);
  const area = make("g", { "clip-path": `url(#clip-${id})` }, drawing);
  for (const layer of layers) {
    const own = make("g", { class: shade(layer.look) }, area);
    if (layer.least) make("path", { d: band(layer.x, layer.least, layer.greatest, px, py), class: "band" }, own);
    if (layer.raw) make("path", { d: trace(layer.x, layer.raw, px, py), class: "raw" }, own);
  }
  // The first variant is drawn last, on top: it is what the others are compared with.
  for (const layer of [...layers].reverse()) {
    const own = make("g", { class: shade(layer.look) }, area);
    make("path", { d: trace(layer.x, layer.y, px, py), class: "line", "stroke-dasharray": dash(layer.look) }, own);
    for (const i of markedPoints(layer, px, view.low))
      make("path", { d: shape(layer.look), class: "marker", transform: `translate(${px(layer.x[i])} ${py(layer.y[i])})` }, own);
  }
}

/** Where markers sit: on every point if they are few or have room, else some 180 pixels apart, staggered by run. */
function markedPoints(layer, px, low) {
  const points = [];
  const seen = layer.x.filter((x) => x >= low).length;
  const room = seen < 2 ? Infinity : (px(layer.x[layer.x.length - 1]) - px(Math.max(low, layer.x[0]))) / (seen - 1);
  const isShort = layer.y.filter((value) => value !== null).length < 8; // a point alone is no line
  const apart = isShort || (layer.sparse && room > 14) ? 0 : 180;
  let next = apart ? px(low) + 40 + ((layer.look * 47) % 180) : -Infinity;
  layer.x.forEach((x, i) => {
    if (x < low || layer.y[i] === null || px(x) < next) return;
    points.push(i);
    next = px(x) + apart;
  });
  return points;
}

/** What every picture has: a heading with buttons that save it, a drawing, and a read-out; `keys` names its curves. */
function makePlot(figure, title, kind, keys, table) {
  const heading = make("div", { class: "heading" }, figure), name = make("h3", {}, heading, title);
  const about = make("span", { class: "muted" }, heading);
  const picture = () => pictureOf(drawing, name.textContent, about.innerText.replaceAll("\n", " "), keys());
  makeSavers(heading, () => name.textContent, picture, table);
  const plot = make("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${title}: arrow keys move the read-out` }, figure);
  const drawing = make("svg", { "aria-hidden": "true" }, plot);
  const readout = make("div", { class: `readout ${kind}`, role: "status", hidden: "" }, plot);

  /** Empty the drawing, which has a height for its width; returns both. */
  function clear(heightOf) {
    const width = Math.max(240, plot.clientWidth), height = heightOf(width);
    for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) drawing.setAttribute(key, value);
    drawing.replaceChildren();
    return { width, height };
  }

  /** Begin a read-out at a place: a line through the drawing; returns its group. Null takes it away. */
  function cross(at, top, bottom) {
    const group = drawing.querySelector(".cross") || make("g", { class: "cross" }, drawing);
    group.replaceChildren();
    readout.replaceChildren();
    readout.hidden = true;
    if (at !== null) make("path", { d: `M${at} ${top}V${bottom}` }, group);
    return group;
  }

  return { figure, heading, name, about, plot, drawing, readout, clear, cross };
}

/** What the pointer and the keys do: `show` a place, `under` the pointer's pixel or `after` a key; null takes it away. */
function followPlot({ plot, drawing }, { under, after, show }) {
  const move = (event) => show(under(event.clientX - drawing.getBoundingClientRect().left));
  plot.addEventListener("pointermove", move);
  plot.addEventListener("pointerdown", move);
  plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") show(null); });
  plot.addEventListener("blur", () => show(null));
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show(null);
    const to = after(event.key, event.shiftKey);
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
}

/** The pixel of a place on the common axis. */
const acrossOf = (view, width, margin) => (x) =>
  margin.left + ((x - view.low) / (view.high - view.low || 1)) * (width - margin.left - margin.right);

/** One lane a run, a mark an event. Returns what a chart returns, so that the crosshair runs through it too. */
function makeTimeline(host, shownRuns) {
  const names = () => frame.runs.map(({ run }) => ({ look: run.variant, name: run.name }));
  const own = makePlot(make("div", { class: "chart wide" }, host), "Events", "events", names, eventRows);
  const { figure, about, plot, drawing, readout } = own, margin = { left: 58, right: 14, top: 6, bottom: 24 }, lane = 22;
  let frame = null;
  about.classList.add("keys");

  function draw(view) {
    const runs = shownRuns().filter(({ run }) => run.events.length);
    figure.hidden = !runs.length;
    readout.hidden = true;
    if (figure.hidden) return;
    const { width, height } = own.clear(() => margin.top + lane * runs.length + margin.bottom);
    const px = acrossOf(view, width, margin);
    drawAcross(make("g", { class: "grid" }, drawing), { view, px, width, height, margin });
    runs.forEach(({ run }, i) => drawLane(run, margin.top + lane * (i + 0.5), { view, px, width }));
    frame = { view, px, width, height, runs };
    drawKeys(runs);
  }

  function drawLane(run, y, { view, px, width }) {
    const group = make("g", { class: `lane ${shade(run.variant)}` }, drawing);
    make("path", { d: `M${margin.left} ${y}H${width - margin.right}`, class: "rail" }, group);
    make("path", { d: shape(run.variant), class: "marker", transform: `translate(${margin.left - 20} ${y})` }, group);
    for (const event of run.events) {
      const x = event.x[view.axis];
      if (x >= view.low && x <= view.high)
        make("path", { d: EVENT_SHAPES[event.kind] || OTHER_EVENT, class: `event ${event.kind === "save" ? "small" : ""}`, transform: `translate(${px(x)} ${y})` }, group);
    }
  }

  function eventRows() {
    const rows = frame.runs.flatMap(({ run }) => run.events.map((e) => [run.name, e.x.step, e.x.tokens, e.x.seconds, e.kind, e.reason]));
    return [["run", "step", "tokens", "seconds", "event", "reason"], ...rows];
  }

  function drawKeys(runs) {
    about.replaceChildren();
    for (const kind of new Set(runs.flatMap(({ run }) => run.events.map((event) => event.kind)))) {
      const key = make("span", { class: "key-of-event" }, about);
      const mark = make("svg", { width: 14, height: 14, "aria-hidden": "true" }, key);
      make("path", { d: EVENT_SHAPES[kind] || OTHER_EVENT, class: "event", transform: "translate(7 7)" }, mark);
      make("span", {}, key, kind);
    }
  }

  function point(x, say) {
    if (!frame || figure.hidden) return;
    const at = x === null ? null : frame.px(x);
    own.cross(at, 0, frame.height - margin.bottom);
    if (x === null || !say) return;
    const near = frame.runs.flatMap(({ run }) => run.events.filter((e) => Math.abs(frame.px(e.x[frame.view.axis]) - at) < 7).slice(0, 4).map((event) => ({ run, event })));
    for (const { run, event } of near.slice(0, 12)) {
      const line = make("div", { class: "row" }, readout);
      swatch(run.variant, line);
      make("span", { class: "name" }, line, `${run.name}: ${event.kind} at step ${event.x.step.toLocaleString("en")}`);
      if (event.reason) make("span", { class: "muted" }, line, event.reason);
    }
    if (near.length) placeReadout(readout, plot, at, frame.height + 4, 0);
  }

  return { ...own, draw, point, margin, frame: () => frame };
}

/** Put a read-out beside the crosshair, or below the drawing where there is no room beside it. */
function placeReadout(readout, plot, at, below, top) {
  readout.hidden = false;
  const room = plot.clientWidth, size = readout.offsetWidth;
  const left = at + 14 + size <= room ? at + 14 : at - 14 - size;
  readout.style.left = `${Math.max(0, Math.min(left, room - size))}px`;
  readout.style.top = `${left < 0 ? below : top}px`;
}
