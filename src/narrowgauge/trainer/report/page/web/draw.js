// What every picture has: a heading with buttons that save it, a drawing with its axes, and a read-out.

/** A plot in `figure`. `spec` has its title and margin; its `keys` name the curves, and its `rows` are their numbers. */
function makePlot(figure, spec) {
  const heading = make("div", { class: "heading" }, figure), name = make("h3", {}, heading, spec.title);
  const about = make("span", { class: "muted" }, heading), margin = { ...spec.margin };
  const picture = () => pictureOf(drawing, name.textContent, about.innerText.replaceAll("\n", " "), spec.keys(own));
  makeSavers(heading, () => name.textContent, picture, () => spec.rows(own));
  const plot = make("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${spec.title}: arrow keys move the read-out` }, figure);
  const drawing = make("svg", { "aria-hidden": "true" }, plot);
  const readout = make("div", { class: `readout ${spec.kind}`, role: "status", hidden: "" }, plot);
  const own = { figure, heading, name, about, margin, plot, drawing, readout, clear, cross, place, frame: null };

  /** Empty the drawing, which has a height for its width. */
  function clear(heightOf) {
    const width = Math.max(240, plot.clientWidth), height = heightOf(width);
    for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) drawing.setAttribute(key, value);
    drawing.replaceChildren();
    readout.hidden = true;
    Object.assign(own, { width, height });
  }

  /** Begin a read-out at a place: a line through the drawing; returns its group. Null takes it away. */
  function cross(at, top) {
    const group = drawing.querySelector(".cross") || make("g", { class: "cross" }, drawing);
    group.replaceChildren();
    readout.replaceChildren();
    readout.hidden = true;
    if (at !== null) make("path", { d: `M${at} ${top}V${own.height - margin.bottom}` }, group);
    return group;
  }

  /** Put the read-out beside the crosshair, or below the drawing where there is no room beside it. */
  function place(at, top) {
    readout.hidden = false;
    const room = plot.clientWidth, size = readout.offsetWidth;
    const left = at + 14 + size <= room ? at + 14 : at - 14 - size;
    readout.style.left = `${Math.max(0, Math.min(left, room - size))}px`;
    readout.style.top = `${left < 0 ? own.height + 4 : top}px`;
  }

  return own;
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

/** Numbers along the left edge. Its margin is made as wide as they need: a sign that is cut off would be read as its opposite. */
function drawUp({ drawing, width, margin }, { ticks, step }, py, { tick, zero }) {
  const grid = make("g", { class: "grid" }, drawing), largest = step ? Math.max(...ticks.map(Math.abs)) : 0;
  const numbers = ticks.map((at) => make("text", { y: py(at) + 4, "text-anchor": "end" }, grid, tick(at, step, largest)));
  margin.left = Math.max(margin.left, 12 + Math.max(...numbers.map((number) => number.getComputedTextLength())));
  for (const number of numbers) number.setAttribute("x", margin.left - 8);
  for (const at of ticks) make("path", { d: `M${margin.left} ${py(at)}H${width - margin.right}`, class: at === 0 && zero ? "zero" : "" }, grid);
  return grid;
}

/** The numbers along the lower edge; those that would be cut off are left out. */
function drawAcross(grid, { frame: { view, px }, width, height, margin }) {
  const wanted = Math.max(2, Math.floor((width - margin.left) / 58));
  const { ticks, step } = linearTicks(view.low / view.unit, view.high / view.unit, wanted);
  for (const tick of ticks) {
    const at = tick * view.unit;
    if (px(at) > width - 24 || px(at) < margin.left - 1) continue;
    make("path", { d: `M${px(at)} ${height - margin.bottom}v4`, class: "tick" }, grid);
    make("text", { x: px(at), y: height - margin.bottom + 17, "text-anchor": "middle" }, grid, short(tick, step, ticks[ticks.length - 1]) + view.unitName);
  }
}

/**
 * A chart in `host`, over the axis that all charts share; `draw(view)` is called whenever the view changes. Of a view
 * `spec` has what is `shown` and its `height`; it can `paint` that, and `tell` what lies at a place.
 */
function makeChart(host, spec) {
  const own = makePlot(make("div", { class: spec.classes }, host), spec), { figure, margin } = own;
  own.draw = (view) => {
    const shown = spec.shown(view);
    figure.hidden = !shown.length;
    if (figure.hidden) return;
    own.clear((width) => spec.height(width, shown));
    // of the margin as it is when called: drawUp may widen it
    const px = (x) => margin.left + ((x - view.low) / (view.high - view.low || 1)) * (own.width - margin.left - margin.right);
    own.frame = { view, shown, px };
    spec.paint(own, own.frame);
  };
  /** Move the crosshair to `x` (null takes it away); say the values only where `say` is true. */
  own.point = (x, say) => {
    if (!own.frame || figure.hidden) return;
    const at = x === null ? null : own.frame.px(x), cross = own.cross(at, spec.top);
    if (x !== null && spec.tell(own, x, { at, cross, say })) own.place(at, spec.top);
  };
  return own;
}
