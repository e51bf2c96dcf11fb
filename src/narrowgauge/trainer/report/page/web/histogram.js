// Where the magnitudes of a tensor lie on the grid of its format: before rounding an outline, after it solid bars.

const edgeOf = (bin, perOctave) => {
  const octave = Math.floor(bin / perOctave);
  return 2 ** octave * (1 + (bin - octave * perOctave) / perOctave);
};

/** The positive numbers of a format up to its largest; none where they are too many to be drawn. */
function gridOf({ max, normal, smallest, mantissa, fixed }) {
  const octaves = Math.log2(max / normal);
  if (fixed || octaves * 2 ** mantissa > 40) return [];
  const grid = [];
  for (let at = smallest; at <= max; at += smallest * Math.max(1, 2 ** Math.floor(Math.log2(at / normal)))) grid.push(at);
  return grid;
}

/** Returns a function (name, histogram or undefined, step, cast) that draws into `host`. */
function makeHistogram(host, formats) {
  const own = makePlot(host, "Histogram", "pairs", () => [], binRows), { heading, plot, drawing, readout } = own;
  const keys = make("p", { class: "keys muted" });
  heading.after(keys);
  for (const kind of ["before", "after"]) {
    const key = make("span", { class: "key-of-event" }, keys), mark = make("svg", { width: 16, height: 12, "aria-hidden": "true" }, key);
    make("rect", { x: 2, y: 2, width: 12, height: 9, class: kind }, mark);
    make("span", {}, key, `${kind} rounding`);
  }
  const margin = { left: 58, right: 10, top: 24, bottom: 40 };
  let now = null, at = null;

  function draw(name, found, step, cast) {
    readout.hidden = true;
    own.name.textContent = `Histogram: ${name}`;
    plot.hidden = keys.hidden = heading.querySelector(".save").hidden = !found;
    own.about.textContent = found
      ? `${cast}, step ${step.toLocaleString("en")}, magnitudes in units of the block's scale, on the grid of ${found.element}`
      : "none was recorded: of places in narrow formats only";
    now = found && frameOf(found, formats[found.element]);
    if (now) paint();
  }

  /** The share of each bin before and after rounding; the first is zero. */
  function binRows() {
    const { found, before, after } = now;
    const edges = (i) => (i === 0 ? [0, 0] : [0, 1].map((up) => edgeOf(found.first + i - 1 + up, found.per_octave)));
    return [["from", "to", "percent before", "percent after"], ...before.map((share, i) => [...edges(i), share, after[i]])];
  }

  function frameOf(found, limits) {
    const total = [found.before, found.after].map((counts, i) => counts.reduce((a, b) => a + b, found.zeros[i]) || 1);
    const share = (i, counts) => counts.map((count) => (100 * count) / total[i]);
    const before = share(0, [found.zeros[0], ...found.before]), after = share(1, [found.zeros[1], ...found.after]);
    // One column for zero, one of room, then the bins.
    const { width, height } = own.clear((width) => (width < 480 ? 230 : 280));
    const columns = found.before.length + 2, each = (width - margin.left - margin.right) / columns;
    const left = (i) => margin.left + (i === 0 ? 0 : i + 1) * each;
    const high = Math.max(...before, ...after, 1) * 1.05;
    const py = (value) => height - margin.bottom - (value / high) * (height - margin.top - margin.bottom);
    const ofValue = (value) => {
      const octave = Math.floor(Math.log2(value) + 1e-9);
      const bin = octave * found.per_octave + (value / 2 ** octave - 1) * found.per_octave - found.first;
      return margin.left + (bin + 2) * each;
    };
    return { found, limits, before, after, width, height, each, left, high, py, ofValue };
  }

  function paint() {
    const { before, after, width, height, each, left, high, py } = now;
    const grid = make("g", { class: "grid" }, drawing), { ticks, step } = linearTicks(0, high, 4);
    for (const tick of ticks) {
      make("path", { d: `M${margin.left} ${py(tick)}H${width - margin.right}`, class: tick === 0 ? "zero" : "" }, grid);
      make("text", { x: margin.left - 8, y: py(tick) + 4, "text-anchor": "end" }, grid, `${short(tick, step)} %`);
    }
    const bar = (i, value, kind) => value > 0 && make("rect", { x: left(i) + 0.5, y: py(value), width: Math.max(1, each - 1), height: py(0) - py(value), class: kind }, drawing);
    after.forEach((value, i) => bar(i, value, "after"));
    before.forEach((value, i) => bar(i, value, "before"));
    drawAcrossGrid(grid);
    drawLimits(make("g", { class: "grid limits" }, drawing));
  }

  function drawAcrossGrid(grid) {
    const { found, height, each, left, ofValue, limits, width } = now, base = height - margin.bottom;
    make("text", { x: left(0) + each / 2, y: base + 17, "text-anchor": "middle" }, grid, "0");
    const every = Math.max(1, Math.ceil(46 / (each * found.per_octave)));
    const first = Math.ceil(found.first / found.per_octave), last = Math.floor((found.first + found.before.length) / found.per_octave);
    for (let octave = first; octave <= last; octave++) {
      const x = ofValue(2 ** octave);
      make("path", { d: `M${x} ${base}v4`, class: "tick" }, grid);
      if (octave % every === 0 && x > left(0) + 44 && x < width - 12) make("text", { x, y: base + 17, "text-anchor": "middle" }, grid, short(2 ** octave));
    }
    for (const value of gridOf(limits)) {
      const x = ofValue(value);
      if (x > left(1) - 1 && x < width) make("path", { d: `M${x} ${base + 22}v8`, class: "point" }, grid);
    }
  }

  /** Dashed lines at the limits of the format; a name gives way where it would meet the one before. */
  function drawLimits(group) {
    const { limits, ofValue, left, height, width } = now, places = [["smallest", limits.smallest], ["normal", limits.normal], ["largest", limits.max]];
    let free = left(1);
    for (const [name, value] of places) {
      const x = ofValue(value), words = `${name} ${short(value)}`;
      if (x < left(1) - 1 || x > width - 4 || (name === "normal" && limits.fixed)) continue;
      make("path", { d: `M${x} ${margin.top - 6}V${height - margin.bottom}` }, group);
      const size = 6.6 * words.length, from = Math.min(Math.max(x - size / 2, free), width - size);
      if (from < free) continue;
      make("text", { x: from, y: 12 }, group, words);
      free = from + size + 8;
    }
  }

  function say(i) {
    at = i;
    const x = i === null || !now ? null : now.left(i) + now.each / 2;
    own.cross(x, margin.top, now?.height - margin.bottom);
    if (x === null) return;
    const { found, height, before, after } = now, bin = found.first + i - 1;
    const [from, to] = [bin, bin + 1].map((b) => short(edgeOf(b, found.per_octave)));
    const isLowest = bin === now.limits.low * found.per_octave; // there lies all that is smaller, too
    const where = i === 0 ? "zero" : isLowest ? `less than ${to}` : `${from} up to ${to}`;
    make("div", { class: "muted all" }, readout, where);
    for (const [kind, values] of [["before", before], ["after", after]]) {
      make("span", {}, readout, kind);
      make("span", { class: "value" }, readout, `${short(values[i])} %`);
    }
    placeReadout(readout, plot, x, height + 4, margin.top);
  }

  followPlot(own, {
    show: say,
    under: (pixel) => {
      const column = Math.floor((pixel - margin.left) / now.each);
      return Math.min(now.before.length - 1, Math.max(0, column - (column > 0 ? 1 : 0)));
    },
    after: (key) => {
      const last = now.before.length - 1, from = at ?? -1;
      return { ArrowLeft: Math.max(0, from - 1), ArrowRight: Math.min(last, from + 1), Home: 0, End: last }[key];
    },
  });
  new ResizeObserver(() => { if (now && plot.clientWidth !== now.width) { now = frameOf(now.found, now.limits); paint(); } }).observe(plot);
  return draw;
}
