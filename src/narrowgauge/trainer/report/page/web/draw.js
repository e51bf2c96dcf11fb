// What every picture has: a heading with buttons that save it, a drawing with its axes, and a read-out.

/**
 * A chart in `figure`; `draw(view)` is called whenever the view changes. Of a view `spec` has what is `shown` and its
 * `height`; it can `paint` that, and `tell` what lies at a place. Its `keys` name the curves, and its `rows` are their
 * numbers. The view has the ends `low` and `high` of the axis across.
 */
function makeChart(figure, spec) {
  const heading = make("div", { class: "heading" }, figure), name = make("h3", {}, heading, spec.title);
  const about = make("span", { class: "muted" }, heading), margin = { ...spec.margin };
  const picture = () => pictureOf(drawing, name.textContent, about.innerText.replaceAll("\n", " "), spec.keys(own));
  makeSavers(heading, () => name.textContent, picture, () => spec.rows(own));
  const plot = make("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${spec.title}: arrow keys move the read-out` }, figure);
  const drawing = make("svg", { "aria-hidden": "true" }, plot);
  const readout = make("div", { class: `readout ${spec.kind}`, role: "status", hidden: "" }, plot);
  const own = { figure, heading, name, about, margin, plot, drawing, readout, draw, point, spec, frame: null };

  function draw(view) {
    const shown = spec.shown(view);
    for (const part of spec.optional?.(own) ?? [figure]) part.hidden = !shown.length;
    readout.hidden = true;
    own.frame = null;
    if (!shown.length) return;
    const width = Math.max(240, plot.clientWidth), height = spec.height(width, shown);
    for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) drawing.setAttribute(key, value);
    drawing.replaceChildren();
    // of the margin as it is when called: drawUp may widen it
    const px = (x) => margin.left + ((x - view.low) / (view.high - view.low || 1)) * (width - margin.left - margin.right);
    const under = (pixel) => view.low + ((pixel - margin.left) / (width - margin.left - margin.right)) * (view.high - view.low);
    Object.assign(own, { width, height, frame: { view, shown, px, under } });
    spec.paint(own, own.frame);
  }

  /** Move the crosshair to `x` (null takes it away), and say the values only where `say` is true. */
  function point(x, say) {
    if (!own.frame) return;
    const cross = drawing.querySelector(".cross") || make("g", { class: "cross" }, drawing), top = spec.top;
    cross.replaceChildren();
    readout.replaceChildren();
    readout.hidden = true;
    if (x === null) return;
    const at = own.frame.px(x);
    make("path", { d: `M${at} ${top}V${own.height - margin.bottom}` }, cross);
    if (!spec.tell(own, x, { at, cross, say })) return;
    readout.hidden = false; // beside the crosshair, or below the drawing where there is no room beside it
    const room = plot.clientWidth, size = readout.offsetWidth;
    const left = at + 14 + size <= room ? at + 14 : at - 14 - size;
    readout.style.left = `${Math.max(0, Math.min(left, room - size))}px`;
    readout.style.top = `${left < 0 ? own.height + 4 : top}px`;
  }

  new ResizeObserver(() => { if (own.frame && plot.clientWidth !== own.width) draw(own.frame.view); }).observe(plot);
  return own;
}

/** One crosshair through `charts`, moved by the pointer and the keys of `chart`, which says the values. */
function followPointer(chart, charts) {
  const { plot, drawing, spec } = chart;
  let at = null;
  const show = (x) => {
    const { low, high } = chart.frame?.view ?? {};
    at = x === null ? null : Math.min(high, Math.max(low, x));
    charts.forEach((other) => other.point(at, other === chart));
  };
  const move = (event) => show(chart.frame.under(event.clientX - drawing.getBoundingClientRect().left));
  plot.addEventListener("pointermove", move);
  plot.addEventListener("pointerdown", move);
  plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") show(null); });
  plot.addEventListener("blur", () => show(null));
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return show(null);
    const { low, high } = chart.frame.view, from = at ?? spec.from ?? high;
    const stride = spec.stride ?? (high - low) / (event.shiftKey ? 20 : 200);
    const to = { ArrowLeft: from - stride, ArrowRight: from + stride, Home: low, End: high }[event.key];
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
