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
const heat = { run: 0, less: -1, gauge: "", step: 0, row: 0, column: 0, cells: [], data: null, reach: {} };
const heatNode = (id) => document.getElementById(`heat-${id}`);

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

/** Take another run, or another run less another; what cannot be chosen with it is switched off. */
function take(run, less) {
  for (const option of heatNode("less").options) {
    const other = Number(option.value);
    option.disabled = other >= 0 && (other === run || !haveCommon(MAPS[run], MAPS[other]));
  }
  if (heatNode("less").selectedOptions[0].disabled) heatNode("less").value = less = -1;
  const data = less < 0 ? MAPS[run] : differenceOf(MAPS[run], MAPS[less]), gauges = [...heatNode("gauge").options];
  const reach = Object.fromEntries(gauges.map(({ value }) => [value, less < 0 ? reachOf(value) : reachOfDifference(value, data)]));
  for (const option of gauges) option.disabled = !Object.keys(data.values[option.value]).length;
  if (heatNode("gauge").selectedOptions[0].disabled) heatNode("gauge").value = gauges.find((option) => !option.disabled).value;

  const table = make("table", { role: "grid" }), head = make("tr", {}, make("thead", {}, table)), body = make("tbody", {}, table);
  for (const name of ["layer", ...data.places]) make("th", { scope: "col" }, head, name);
  const cells = data.layers.map((layer, row) => {
    const line = make("tr", {}, body);
    make("th", { scope: "row" }, line, layer);
    return data.places.map((_, column) => make("td", { "data-row": row, "data-column": column, tabindex: "-1" }, line));
  });
  MAP.querySelector(".heat").replaceChildren(table);
  MAP.classList.toggle("difference", less >= 0);
  heatNode("step").max = data.steps.length - 1;
  const row = Math.min(heat.row, data.layers.length - 1), column = Math.min(heat.column, data.places.length - 1);
  Object.assign(heat, { run, less, data, reach, cells, row, column });
}

function paint() {
  const { gauge, step, data, cells } = heat, reach = heat.reach[gauge], { title, about, down } = GAUGES[gauge];
  cells.forEach((line, row) => line.forEach((cell, column) => {
    const value = shownNumber(row, column), share = value === null ? 0 : reach.share(value);
    cell.textContent = value === null ? "" : shownFigure(gauge, value);
    cell.style.setProperty("--share", Math.abs(share).toFixed(3));
    cell.classList.toggle("unread", value === null);
    cell.classList.toggle("cool", share < 0);
  }));
  hideUnread();
  heatNode("step-says").textContent = stepName(step);
  const [a, b] = [data.run, data.other].map((run) => RUNS[run]?.name), up = down ? "lower" : "higher";
  heatNode("about").textContent = isDifference()
    ? `${title} of ${a} less that of ${b}, at the same step, layer and place. Orange: ${a} is ${up}; blue: ${b} is ${up}.`
    : about;
  heatNode("low").textContent = inWords(gauge, reach.pale) + (down && !isDifference() ? " and more" : "");
  heatNode("high").textContent = inWords(gauge, reach.full);
  const isShown = (row, column) => data.values[gauge][placeOf(column)] && !cells[row][column].parentNode.hidden;
  if (!isShown(heat.row, heat.column)) {
    heat.column = Math.max(0, data.places.findIndex((place) => data.values[gauge][place]));
    heat.row = Math.max(0, cells.findIndex((_, row) => isShown(row, heat.column)));
  }
  choose(heat.row, heat.column);
}

/** Places and layers of which this gauge says nothing at any step are left out. */
function hideUnread() {
  const { values, places } = heat.data, [head, ...lines] = MAP.querySelector(".heat table").rows, read = values[heat.gauge];
  for (const line of [head, ...lines]) places.forEach((place, column) => { line.cells[column + 1].hidden = !read[place]; });
  const rows = Object.values(read).flat();
  lines.forEach((line, row) => { line.hidden = !rows.some((layers) => layers[row] !== null); });
}

function choose(row, column) {
  const { data, step, cells } = heat;
  cells.flat().forEach((cell) => { cell.classList.remove("chosen"); cell.setAttribute("tabindex", "-1"); });
  Object.assign(heat, { row, column });
  cells[row][column].classList.add("chosen");
  cells[row][column].setAttribute("tabindex", "0");
  sayCell(row, column);
  const here = data.histograms.filter((h) => h.at[1] === row && h.at[2] === column);
  const found = here.sort((a, b) => Math.abs(a.at[0] - step) - Math.abs(b.at[0] - step))[0], cast = data.casts[row][column];
  heat.drawHistogram(cellName(row, column), found, found && data.steps[found.at[0]], MAPS.length > 1 ? `${RUNS[data.run].name}, ${cast}` : cast);
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

/** Move the choice by an arrow key, over what is hidden. */
function moveChoice(event) {
  const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!move) return;
  event.preventDefault();
  let { row, column } = heat, cell;
  do {
    [row, column] = [row + move[0], column + move[1]];
    cell = heat.cells[row]?.[column];
  } while (cell && (cell.hidden || cell.parentNode.hidden));
  if (!cell) return;
  choose(row, column);
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
  const told = Object.keys(GAUGES).filter((gauge) => MAPS.some((data) => Object.keys(data.values[gauge]).length));
  const choices = { run: runs, less: [[-1, "nothing"], ...runs], gauge: told.map((gauge) => [gauge, GAUGES[gauge].title]) };
  for (const [id, options] of Object.entries(choices)) {
    for (const [value, name] of options) make("option", { value }, heatNode(id), name);
    if (id !== "gauge") heatNode(id).closest("label").hidden = MAPS.length < 2;
  }
  heat.drawHistogram = makeHistogram(document.getElementById("histogram"), DATA.gauges.formats);
  MAP.hidden = false;
  const { run, row, column } = noisiestCell();
  Object.assign(heat, { row, column });
  heatNode("run").value = run;
  MAP.querySelector(".controls").addEventListener("input", readHeat);
  const table = MAP.querySelector(".heat");
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
