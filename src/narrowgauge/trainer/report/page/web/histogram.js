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

/** Of a view with a histogram `found` and the `limits` of its format; across are zero and the bins, by number. */
const HISTOGRAM = {
  title: "Histogram", kind: "pairs", margin: { left: 58, right: 10, top: 24, bottom: 40 }, top: 24,
  stride: 1, from: -1, zero: true, tick: (...of) => `${short(...of)} %`,
  height: (width) => (width < 480 ? 230 : 280),
  optional: ({ heading, plot }) => [plot, heading.nextSibling, heading.querySelector(".save")],
  shown: ({ found }) => (found ? [found] : []),
  keys: () => [],

  /** The share of each bin before and after rounding; the first is zero. */
  rows({ frame: { view: { found }, before, after } }) {
    const edges = (i) => (i === 0 ? [0, 0] : [0, 1].map((up) => edgeOf(found.first + i - 1 + up, found.per_octave)));
    return [["from", "to", "percent before", "percent after"], ...before.map((share, i) => [...edges(i), share, after[i]])];
  },

  paint(own, { view: { found, limits } }) {
    const { drawing, width, height, margin } = own, base = height - margin.bottom;
    const shares = (counts, zeros) => {
      const total = counts.reduce((a, b) => a + b, zeros) || 1;
      return [zeros, ...counts].map((count) => (100 * count) / total);
    };
    const before = shares(found.before, found.zeros[0]), after = shares(found.after, found.zeros[1]);
    const high = Math.max(...before, ...after, 1) * 1.05, py = (value) => base - (value / high) * (base - margin.top);
    const grid = drawUp(own, linearTicks(0, high, 4), py, this);
    // One column for zero, one of room, then the bins.
    const each = (width - margin.left - margin.right) / (before.length + 1), left = (i) => margin.left + (i === 0 ? 0 : i + 1) * each;
    const ofValue = (value) => {
      const octave = Math.floor(Math.log2(value) + 1e-9);
      const bin = octave * found.per_octave + (value / 2 ** octave - 1) * found.per_octave - found.first;
      return margin.left + (bin + 2) * each;
    };
    const px = (i) => left(i) + each / 2, under = (pixel) => {
      const column = Math.floor((pixel - margin.left) / each);
      return column - (column > 0 ? 1 : 0);
    };
    Object.assign(own.frame, { before, after, px, under });
    for (const [kind, values] of Object.entries({ after, before }))
      values.forEach((value, i) => value > 0 && make("rect", { x: left(i) + 0.5, y: py(value), width: Math.max(1, each - 1), height: base - py(value), class: kind }, drawing));

    const number = (x, text) => make("text", { x, y: base + 17, "text-anchor": "middle" }, grid, text);
    number(px(0), "0");
    const every = Math.max(1, Math.ceil(46 / (each * found.per_octave)));
    const first = Math.ceil(found.first / found.per_octave), last = Math.floor((found.first + found.before.length) / found.per_octave);
    for (let octave = first; octave <= last; octave++) {
      const x = ofValue(2 ** octave);
      make("path", { d: `M${x} ${base}v4`, class: "tick" }, grid);
      if (octave % every === 0 && x > left(0) + 44 && x < width - 12) number(x, short(2 ** octave));
    }
    for (const x of gridOf(limits).map(ofValue))
      if (x > left(1) - 1 && x < width) make("path", { d: `M${x} ${base + 22}v8`, class: "point" }, grid);

    // Dashed lines at the limits of the format; a name gives way where it would meet the one before.
    const group = make("g", { class: "grid limits" }, drawing);
    let free = left(1);
    for (const [name, value] of Object.entries({ smallest: limits.smallest, normal: limits.normal, largest: limits.max })) {
      const x = ofValue(value), words = `${name} ${short(value)}`;
      if (x < left(1) - 1 || x > width - 4 || (name === "normal" && limits.fixed)) continue;
      make("path", { d: `M${x} ${margin.top - 6}V${base}` }, group);
      const size = 6.6 * words.length, from = Math.min(Math.max(x - size / 2, free), width - size);
      if (from < free) continue;
      make("text", { x: from, y: 12 }, group, words);
      free = from + size + 8;
    }
  },

  tell({ readout, frame: { view: { found, limits }, before, after } }, i) {
    const bin = found.first + i - 1, [from, to] = [bin, bin + 1].map((b) => short(edgeOf(b, found.per_octave)));
    const isLowest = bin === limits.low * found.per_octave; // there lies all that is smaller, too
    make("div", { class: "muted all" }, readout, i === 0 ? "zero" : isLowest ? `less than ${to}` : `${from} up to ${to}`);
    for (const [kind, values] of Object.entries({ before, after })) {
      make("span", {}, readout, kind);
      make("span", { class: "value" }, readout, `${short(values[i])} %`);
    }
    return true;
  },
};

function makeHistogram(host) {
  const own = makeChart(host, HISTOGRAM), keys = make("p", { class: "keys muted" });
  own.heading.after(keys);
  for (const kind of ["before", "after"]) {
    const key = make("span", { class: "key-of-event" }, keys), box = make("svg", { width: 16, height: 12, "aria-hidden": "true" }, key);
    make("rect", { x: 2, y: 2, width: 12, height: 9, class: kind }, box);
    make("span", {}, key, `${kind} rounding`);
  }
  followPointer(own, [own]);
  return own;
}
