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

const HISTOGRAM = {
  title: "Histogram", kind: "pairs", margin: { left: 58, right: 10, top: 24, bottom: 40 },
  zero: true, tick: (...of) => `${short(...of)} %`,
  keys: () => [],

  /** The share of each bin before and after rounding; the first is zero. */
  rows({ frame: { found, before, after } }) {
    const edges = (i) => (i === 0 ? [0, 0] : [0, 1].map((up) => edgeOf(found.first + i - 1 + up, found.per_octave)));
    return [["from", "to", "percent before", "percent after"], ...before.map((share, i) => [...edges(i), share, after[i]])];
  },
};

/** Returns a function (name, histogram or undefined, step, cast) that draws into `host`. */
function makeHistogram(host, formats) {
  const own = makePlot(host, HISTOGRAM), { heading, plot, drawing, readout, margin } = own;
  const keys = make("p", { class: "keys muted" });
  heading.after(keys);
  for (const kind of ["before", "after"]) {
    const key = make("span", { class: "key-of-event" }, keys), mark = make("svg", { width: 16, height: 12, "aria-hidden": "true" }, key);
    make("rect", { x: 2, y: 2, width: 12, height: 9, class: kind }, mark);
    make("span", {}, key, `${kind} rounding`);
  }
  let at = null;

  function draw(name, found, step, cast) {
    readout.hidden = true;
    own.name.textContent = `Histogram: ${name}`;
    plot.hidden = keys.hidden = heading.querySelector(".save").hidden = !found;
    own.about.textContent = found
      ? `${cast}, step ${step.toLocaleString("en")}, magnitudes in units of the block's scale, on the grid of ${found.element}`
      : "none was recorded: of places in narrow formats only";
    own.frame = null;
    if (found) paint(found);
  }

  function paint(found) {
    const shares = (counts, zeros) => {
      const total = counts.reduce((a, b) => a + b, zeros) || 1;
      return [zeros, ...counts].map((count) => (100 * count) / total);
    };
    const before = shares(found.before, found.zeros[0]), after = shares(found.after, found.zeros[1]);
    own.clear((width) => (width < 480 ? 230 : 280));
    // One column for zero, one of room, then the bins.
    const each = (own.width - margin.left - margin.right) / (before.length + 1), base = own.height - margin.bottom;
    const left = (i) => margin.left + (i === 0 ? 0 : i + 1) * each;
    const ofValue = (value) => {
      const octave = Math.floor(Math.log2(value) + 1e-9);
      const bin = octave * found.per_octave + (value / 2 ** octave - 1) * found.per_octave - found.first;
      return margin.left + (bin + 2) * each;
    };
    own.frame = { found, limits: formats[found.element], before, after, each, base, left, ofValue };
    const high = Math.max(...before, ...after, 1) * 1.05, py = (value) => base - (value / high) * (base - margin.top);
    const grid = drawUp(own, linearTicks(0, high, 4), py, HISTOGRAM);
    for (const [kind, values] of Object.entries({ after, before }))
      values.forEach((value, i) => value > 0 && make("rect", { x: left(i) + 0.5, y: py(value), width: Math.max(1, each - 1), height: base - py(value), class: kind }, drawing));
    drawBins(grid, own.frame);
    drawLimits(make("g", { class: "grid limits" }, drawing), own.frame);
  }

  function drawBins(grid, { found, base, each, left, ofValue, limits }) {
    const number = (x, text) => make("text", { x, y: base + 17, "text-anchor": "middle" }, grid, text);
    number(left(0) + each / 2, "0");
    const every = Math.max(1, Math.ceil(46 / (each * found.per_octave)));
    const first = Math.ceil(found.first / found.per_octave), last = Math.floor((found.first + found.before.length) / found.per_octave);
    for (let octave = first; octave <= last; octave++) {
      const x = ofValue(2 ** octave);
      make("path", { d: `M${x} ${base}v4`, class: "tick" }, grid);
      if (octave % every === 0 && x > left(0) + 44 && x < own.width - 12) number(x, short(2 ** octave));
    }
    for (const x of gridOf(limits).map(ofValue))
      if (x > left(1) - 1 && x < own.width) make("path", { d: `M${x} ${base + 22}v8`, class: "point" }, grid);
  }

  /** Dashed lines at the limits of the format; a name gives way where it would meet the one before. */
  function drawLimits(group, { limits, base, left, ofValue }) {
    let free = left(1);
    for (const [name, value] of Object.entries({ smallest: limits.smallest, normal: limits.normal, largest: limits.max })) {
      const x = ofValue(value), words = `${name} ${short(value)}`;
      if (x < left(1) - 1 || x > own.width - 4 || (name === "normal" && limits.fixed)) continue;
      make("path", { d: `M${x} ${margin.top - 6}V${base}` }, group);
      const size = 6.6 * words.length, from = Math.min(Math.max(x - size / 2, free), own.width - size);
      if (from < free) continue;
      make("text", { x: from, y: 12 }, group, words);
      free = from + size + 8;
    }
  }

  function say(i) {
    at = i;
    const x = i === null || !own.frame ? null : own.frame.left(i) + own.frame.each / 2;
    own.cross(x, margin.top);
    if (x === null) return;
    const { found, limits, before, after } = own.frame, bin = found.first + i - 1;
    const [from, to] = [bin, bin + 1].map((b) => short(edgeOf(b, found.per_octave)));
    const isLowest = bin === limits.low * found.per_octave; // there lies all that is smaller, too
    make("div", { class: "muted all" }, readout, i === 0 ? "zero" : isLowest ? `less than ${to}` : `${from} up to ${to}`);
    for (const [kind, values] of Object.entries({ before, after })) {
      make("span", {}, readout, kind);
      make("span", { class: "value" }, readout, `${short(values[i])} %`);
    }
    own.place(x, margin.top);
  }

  followPlot(own, {
    show: say,
    under: (pixel) => {
      const column = Math.floor((pixel - margin.left) / own.frame.each);
      return Math.min(own.frame.before.length - 1, Math.max(0, column - (column > 0 ? 1 : 0)));
    },
    after: (key) => {
      const last = own.frame.before.length - 1, from = at ?? -1;
      return { ArrowLeft: Math.max(0, from - 1), ArrowRight: Math.min(last, from + 1), Home: 0, End: last }[key];
    },
  });
  new ResizeObserver(() => { if (own.frame && plot.clientWidth !== own.width) paint(own.frame.found); }).observe(plot);
  return draw;
}
