// The map of gauges: a table of layers and places, coloured by one gauge at one step, and a cell chosen in it.

// A gauge has colour from `from` on and all of it at `full`, or at the most extreme value if that lies beyond. Both are
// fixed, so that a colour means the same on every page, and what is unremarkable stays pale.
const inShare = { unit: " %", scale: Math.sqrt, from: 0, full: 1 };
const GAUGES = {
  sqnr: { title: "SQNR", unit: " dB", down: true, from: 40, full: 10, says: (v) => v.toFixed(1), about: "Signal to quantization noise in decibels: at 20 dB the noise is a tenth of the values. Orange is noisy; cells of 40 dB and more have no color." },
  underflow: { title: "underflow", ...inShare, about: "Share of the elements that were not zero and became zero." },
  zeros: { title: "zeros", ...inShare, about: "Share of the elements that are zero after the cast." },
  largest: { title: "saturation", ...inShare, about: "Share of the elements at the largest value of the format, where the largest element of a block often lies." },
  clipped: { title: "clipped", ...inShare, about: "Share of the elements that lay beyond the largest value and were clipped to it." },
  nonfinite: { title: "not finite", ...inShare, full: 0, about: "Share of the elements that are NaN or infinite." },
  amax: { title: "amax", unit: "", scale: Math.log, about: "Largest magnitude of the tensor. The color is logarithmic." },
  spread: { title: "amax over blocks", unit: " oct", from: 0, about: "Octaves from the median of the blocks' largest magnitudes up to the largest of them." },
  scales: { title: "scale range", unit: " oct", from: 0, about: "Octaves from the smallest scale of a block to the largest." },
  bias: { title: "bias", unit: " %", scale: (v) => Math.sqrt(Math.abs(v)), from: 0, full: 1, about: "Mean error in percent of the root mean square: rounding to nearest should leave almost none. Orange is far from zero." },
  unlike: { title: "matmul, 1 - cosine", unit: "", scale: Math.sqrt, from: 0, full: 0.01, about: "How far the result of a matmul points away from the same result in float32: 1 minus the cosine of the angle." },
};
const MAPS = DATA.gauges.runs, MAP = document.querySelector(".map");
const heat = { run: 0, less: -1, gauge: "", step: 0, row: 0, column: 0, data: null, reach: {}, histogram: null };
const heatNode = (id) => document.getElementById(`heat-${id}`);
const heatTable = () => MAP.querySelector(".heat");

const numberOf = (data, gauge, step, row, place) => data.values[gauge][place]?.[step]?.[row] ?? null;
const placeOf = (column) => heat.data.places[column];
const shownNumber = (row, column, gauge = heat.gauge) => numberOf(heat.data, gauge, heat.step, row, placeOf(column));
const isDifference = () => heat.less >= 0;
const shownFigure = (gauge, value) => {
  const text = (GAUGES[gauge].says || short)(value);
  return isDifference() ? signed(text) : text;
};
const inWords = (gauge, value) => (value === null ? "not read" : shownFigure(gauge, value) + GAUGES[gauge].unit);
const cellName = (row, column) => `${heat.data.layers[row]}, ${placeOf(column)}`;
const stepName = (step) => heat.data.steps[step].toLocaleString("en");

/** The ends of a gauge's colours over all runs and steps, `pale` and `full`, and how much colour a value has, 0 to 1. */
function reachOf(gauge) {
  const { scale = (v) => v, from, full, down } = GAUGES[gauge], sign = down ? -1 : 1;
  const ends = [from, full].filter((v) => v !== undefined);
  for (const data of MAPS)
    for (const steps of Object.values(data.values[gauge]))
      ends.push(...steps.flat().filter((v) => v !== null && isFinite(scale(v))));
  const at = (v) => sign * scale(v);
  const outmost = (is) => ends.reduce((a, b) => (is(at(b), at(a)) ? b : a), ends[0] ?? 0);
  const pale = from ?? outmost((b, a) => b < a), strong = outmost((b, a) => b > a);
  const share = (value) => (at(value) - at(pale)) / (at(strong) - at(pale));
  return { pale, full: strong, share: (value) => (isFinite(share(value)) ? Math.max(0, share(value)) : 0) };
}

/** The reach of a difference: the widest on both sides of zero. What is better has a negative share. */
function reachOfDifference(gauge, data) {
  const sizes = Object.values(data.values[gauge]).flat(2).filter((value) => value !== null).map(Math.abs);
  const high = Math.max(...sizes, 0) || 1;
  const full = GAUGES[gauge].down ? -high : high;
  return { pale: -full, full, share: (value) => value / full };
}

/** `a` less `b`, in the form of one run's readings, where both were read; the histograms are those of `a`. */
function differenceOf(a, b) {
  // Positions in two lists of what both have, in the order of the first.
  const shared = (list) => a[list].map((item, i) => [i, b[list].indexOf(item)]).filter(([, j]) => j >= 0);
  const [steps, layers, places] = ["steps", "layers", "places"].map(shared), values = {};
  const less = (ours, theirs) => (ours === null || theirs === null ? null : Number((ours - theirs).toPrecision(6)));
  for (const gauge of Object.keys(a.values)) {
    values[gauge] = {};
    for (const place of places.map(([i]) => a.places[i])) {
      const ours = a.values[gauge][place], theirs = b.values[gauge]?.[place];
      if (!ours || !theirs) continue;
      const rows = steps.map(([s, t]) => layers.map(([l, m]) => less(ours[s][l], theirs[t][m])));
      if (rows.flat().some((value) => value !== null)) values[gauge][place] = rows;
    }
  }
  const castOf = (l, m, p, q) => [...new Set([a.casts[l][p], b.casts[m][q]])].filter(Boolean).join(" and ");
  const at = (list, old) => list.findIndex(([i]) => i === old);
  const moved = a.histograms.map((h) => ({ ...h, at: [at(steps, h.at[0]), at(layers, h.at[1]), at(places, h.at[2])] }));
  return {
    run: a.run, other: b.run, values,
    steps: steps.map(([i]) => a.steps[i]), layers: layers.map(([i]) => a.layers[i]), places: places.map(([i]) => a.places[i]),
    casts: layers.map(([l, m]) => places.map(([p, q]) => castOf(l, m, p, q))),
    histograms: moved.filter((h) => !h.at.includes(-1)),
  };
}

/** The gauges that were read in a map. */
const readIn = (data) => Object.keys(GAUGES).filter((gauge) => Object.keys(data.values[gauge] ?? {}).length);

/** Take another run, or another run less another; what cannot be chosen with it is switched off. */
function take(run, less) {
  for (const option of heatNode("less").options) {
    const other = Number(option.value);
    option.disabled = other >= 0 && (other === run || !readIn(differenceOf(MAPS[run], MAPS[other])).length);
  }
  if (heatNode("less").selectedOptions[0].disabled) heatNode("less").value = less = -1;
  const data = less < 0 ? MAPS[run] : differenceOf(MAPS[run], MAPS[less]), read = readIn(data);
  const reach = Object.fromEntries(read.map((gauge) => [gauge, less < 0 ? reachOf(gauge) : reachOfDifference(gauge, data)]));
  for (const option of heatNode("gauge").options) option.disabled = !read.includes(option.value);
  if (heatNode("gauge").selectedOptions[0].disabled) heatNode("gauge").value = read[0];
  MAP.classList.toggle("difference", less >= 0);
  heatNode("step").max = data.steps.length - 1;
  Object.assign(heat, { run, less, data, reach });
}

/** Make the table; places and layers of which this gauge says nothing at any step are left out. */
function paint() {
  const { gauge, data } = heat, reach = heat.reach[gauge], read = data.values[gauge], { title, about, down } = GAUGES[gauge];
  const columns = [...data.places.keys()].filter((column) => read[placeOf(column)]);
  const rows = [...data.layers.keys()].filter((row) => Object.values(read).flat().some((layers) => layers[row] !== null));
  const table = make("table", { role: "grid" }), head = make("tr", {}, make("thead", {}, table)), body = make("tbody", {}, table);
  for (const name of ["layer", ...columns.map(placeOf)]) make("th", { scope: "col" }, head, name);
  for (const row of rows) {
    const line = make("tr", {}, body);
    make("th", { scope: "row" }, line, data.layers[row]);
    for (const column of columns) {
      const value = shownNumber(row, column), share = value === null ? 0 : reach.share(value), style = `--share: ${Math.abs(share).toFixed(3)}`;
      const cell = make("td", { "data-row": row, "data-column": column, tabindex: "-1", style }, line, value === null ? "" : shownFigure(gauge, value));
      cell.classList.toggle("unread", value === null);
      cell.classList.toggle("cool", share < 0);
    }
  }
  heatTable().replaceChildren(table);
  heatNode("step-says").textContent = stepName(heat.step);
  const [a, b] = [data.run, data.other].map((run) => RUNS[run]?.name), up = down ? "lower" : "higher";
  heatNode("about").textContent = isDifference()
    ? `${title} of ${a} less that of ${b}, at the same step, layer and place. Orange: ${a} is ${up}; blue: ${b} is ${up}.`
    : about;
  heatNode("low").textContent = inWords(gauge, reach.pale) + (down && !isDifference() ? " and more" : "");
  heatNode("high").textContent = inWords(gauge, reach.full);
  if (rows.includes(heat.row) && columns.includes(heat.column)) choose(heat.row, heat.column);
  else choose(rows[0], columns[0]);
}

function choose(row, column) {
  const { data, step } = heat, cast = data.casts[row][column], chosen = heatTable().querySelector(".chosen");
  chosen?.classList.remove("chosen");
  chosen?.setAttribute("tabindex", "-1");
  Object.assign(heat, { row, column });
  const cell = heatTable().querySelector(`[data-row="${row}"][data-column="${column}"]`);
  cell.classList.add("chosen");
  cell.setAttribute("tabindex", "0");
  sayCell(row, column);
  const here = data.histograms.filter((h) => h.at[1] === row && h.at[2] === column);
  const found = here.sort((a, b) => Math.abs(a.at[0] - step) - Math.abs(b.at[0] - step))[0];
  const { name, about } = heat.histogram, of = MAPS.length > 1 ? `${RUNS[data.run].name}, ${cast}` : cast;
  name.textContent = `Histogram: ${cellName(row, column)}`;
  about.textContent = found
    ? `${of}, step ${stepName(found.at[0])}, magnitudes in units of the block's scale, on the grid of ${found.element}`
    : "none was recorded: of places in narrow formats only";
  heat.histogram.draw({ found, limits: DATA.gauges.formats[found?.element], low: 0, high: found?.before.length });
  sayNumbers();
}

function sayCell(row, column) {
  const cast = heat.data.casts[row][column], value = inWords(heat.gauge, shownNumber(row, column));
  heatNode("said").textContent = `${cellName(row, column)}${cast ? ` (${cast})` : ""}: ${GAUGES[heat.gauge].title} ${value}`;
}

/** Every gauge of the chosen cell. */
function sayNumbers() {
  const { row, column, step } = heat, host = MAP.querySelector(".numbers"), list = make("dl", {});
  const name = make("h3", {}, null, `${cellName(row, column)}, step ${stepName(step)}${isDifference() ? ": difference" : ""}`);
  host.replaceChildren(name, list);
  for (const [gauge, { title }] of Object.entries(GAUGES)) {
    const value = shownNumber(row, column, gauge);
    if (value === null) continue;
    const line = make("div", {}, list);
    make("dt", {}, line, title);
    make("dd", {}, line, inWords(gauge, value));
  }
  if (!list.children.length) make("p", { class: "empty" }, host, "Nothing was read here.");
}

/** The map that is shown, as rows of cells: every step of the chosen gauge. */
function mapRows() {
  const { data, gauge } = heat;
  const rows = Object.entries(data.values[gauge]).flatMap(([place, steps]) => steps.flatMap((layers, step) => layers.map(
    (value, row) => [data.steps[step], data.layers[row], place, data.casts[row][data.places.indexOf(place)], value])));
  return [["step", "layer", "place", "cast", gauge], ...rows.filter((row) => row[4] !== null)];
}

/** What the selects and the slider ask for. */
function readHeat() {
  const before = heat.data?.steps[heat.step], run = Number(heatNode("run").value), less = Number(heatNode("less").value);
  if (run !== heat.run || less !== heat.less || !heat.data) {
    take(run, less);
    const { steps } = heat.data;
    heatNode("step").value = before === undefined ? steps.length - 1 : nearest(steps, before);
  }
  heat.gauge = heatNode("gauge").value;
  heat.step = Math.min(Number(heatNode("step").value), heat.data.steps.length - 1);
  paint();
}

/** Move the choice by an arrow key. */
function moveChoice(event) {
  const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!move) return;
  event.preventDefault();
  const { cellIndex, parentNode: line } = heatTable().querySelector(".chosen");
  const cell = line.parentNode.rows[line.sectionRowIndex + move[0]]?.cells[cellIndex + move[1]];
  if (!cell?.dataset.row) return;
  choose(Number(cell.dataset.row), Number(cell.dataset.column));
  cell.focus();
}

/** Where to look first: the cell with the most noise at the last step, of all runs. */
function noisiestCell() {
  let worst = { value: Infinity, run: 0, row: 0, column: 0 };
  MAPS.forEach((data, run) => data.places.forEach((place, column) => data.layers.forEach((_, row) => {
    const value = numberOf(data, "sqnr", data.steps.length - 1, row, place);
    const drawn = data.histograms.some((h) => h.at[1] === row && h.at[2] === column);
    if (value !== null && drawn && value < worst.value) worst = { value, run, row, column };
  })));
  return worst;
}

function startHeat() {
  const runs = MAPS.map((data, i) => [i, RUNS[data.run].name]);
  const told = Object.keys(GAUGES).filter((gauge) => MAPS.some((data) => readIn(data).includes(gauge)));
  const choices = { run: runs, less: [[-1, "nothing"], ...runs], gauge: told.map((gauge) => [gauge, GAUGES[gauge].title]) };
  for (const [id, options] of Object.entries(choices)) {
    for (const [value, name] of options) make("option", { value }, heatNode(id), name);
    if (id !== "gauge") heatNode(id).closest("label").hidden = MAPS.length < 2;
  }
  heat.histogram = makeHistogram(document.getElementById("histogram"));
  MAP.hidden = false;
  const { run, row, column } = noisiestCell();
  Object.assign(heat, { row, column });
  heatNode("run").value = run;
  MAP.querySelector(".controls").addEventListener("input", readHeat);
  const table = heatTable();
  const at = (act) => ({ target }) => { const cell = target.closest("td"); if (cell) act(Number(cell.dataset.row), Number(cell.dataset.column)); };
  table.addEventListener("click", at(choose));
  table.addEventListener("pointerover", at(sayCell));
  table.addEventListener("pointerleave", () => sayCell(heat.row, heat.column));
  table.addEventListener("keydown", moveChoice);
  readHeat();
  const name = () => `${RUNS[heat.data.run].name}${isDifference() ? ` less ${RUNS[heat.data.other].name}` : ""} ${GAUGES[heat.gauge].title}`;
  makeSavers(MAP.querySelector(".ramp"), name, null, mapRows);
}

if (MAP && MAPS.length) startHeat();
