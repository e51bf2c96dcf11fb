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
const heat = { run: 0, less: -1, gauge: "", step: 0, row: 0, column: 0, cells: [], data: null, reach: {} };

const numberOf = (data, gauge, step, row, place) => data.values[gauge][place]?.[step]?.[row] ?? null;
const figure = (gauge, value) => (GAUGES[gauge].says || short)(value);
const isDifference = () => heat.less >= 0;
const shownFigure = (gauge, value) => (isDifference() ? signed(figure(gauge, value)) : figure(gauge, value));
const inWords = (gauge, value) => (value === null ? "not read" : shownFigure(gauge, value) + GAUGES[gauge].unit);

/** The ends of a gauge's colours over all runs and steps: at `pale` there is none, at `full` there is all of it. */
function reachOf(gauge, all) {
  const { scale = (v) => v, from, full, down } = GAUGES[gauge], sign = down ? -1 : 1;
  const ends = [from, full].filter((v) => v !== undefined);
  for (const data of all)
    for (const steps of Object.values(data.values[gauge]))
      ends.push(...steps.flat().filter((v) => v !== null && isFinite(scale(v))));
  const at = (v) => sign * scale(v);
  const outmost = (is) => ends.reduce((a, b) => (is(at(b), at(a)) ? b : a), ends[0] ?? 0);
  const pale = from ?? outmost((b, a) => b < a), strong = outmost((b, a) => b > a);
  return { pale, full: strong, at };
}

/** How much colour a value has, 0 to 1: colour is what deserves a look. A difference has a sign: what is better is negative. */
function shareOf(gauge, value, reach) {
  if (isDifference()) return (GAUGES[gauge].down ? -value : value) / reach.high;
  const share = (reach.at(value) - reach.at(reach.pale)) / (reach.at(reach.full) - reach.at(reach.pale));
  return isFinite(share) ? Math.max(0, share) : 0;
}

function startHeat() {
  const map = document.querySelector(".map"), all = DATA.gauges.runs;
  if (!map || !all.length) return;
  const byId = (id) => document.getElementById(`heat-${id}`);
  const told = Object.keys(GAUGES).filter((gauge) => all.some((data) => Object.keys(data.values[gauge]).length));
  all.forEach((data, i) => make("option", { value: i }, byId("run"), RUNS[data.run].name));
  make("option", { value: -1 }, byId("less"), "nothing");
  all.forEach((data, i) => make("option", { value: i }, byId("less"), RUNS[data.run].name));
  told.forEach((gauge) => make("option", { value: gauge }, byId("gauge"), GAUGES[gauge].title));
  for (const id of ["run", "less"]) byId(id).closest("label").hidden = all.length < 2;
  const reachOfAll = Object.fromEntries(told.map((gauge) => [gauge, reachOf(gauge, all)]));
  const drawHistogram = makeHistogram(document.getElementById("histogram"), DATA.gauges.formats);
  map.hidden = false;
  const { run, row, column } = noisiestCell(all);
  Object.assign(heat, { row, column });
  byId("run").value = run;

  const data = () => heat.data;
  const placeOf = (column) => data().places[column];
  const cellSays = (row, column) => {
    const cast = data().casts[row][column], place = placeOf(column);
    const value = inWords(heat.gauge, numberOf(data(), heat.gauge, heat.step, row, place));
    return `${data().layers[row]}, ${place}${cast ? ` (${cast})` : ""}: ${GAUGES[heat.gauge].title} ${value}`;
  };

  /** Take another run, or another run less another; what cannot be chosen with it is switched off. */
  function take(run, less) {
    for (const option of byId("less").options) {
      const other = Number(option.value);
      option.disabled = other >= 0 && (other === run || !haveCommon(all[run], all[other]));
    }
    if (byId("less").selectedOptions[0].disabled) byId("less").value = less = -1;
    Object.assign(heat, { run, less, data: less < 0 ? all[run] : differenceOf(all[run], all[less]) });
    heat.reach = less < 0 ? reachOfAll : Object.fromEntries(told.map((gauge) => [gauge, reachOfDifference(gauge, heat.data)]));
    for (const option of byId("gauge").options) option.disabled = !Object.keys(heat.data.values[option.value]).length;
    if (byId("gauge").selectedOptions[0].disabled) byId("gauge").value = [...byId("gauge").options].find((option) => !option.disabled).value;
    rebuild();
  }

  function rebuild() {
    const host = map.querySelector(".heat"), table = make("table", { role: "grid" });
    const head = make("tr", {}, make("thead", {}, table)), body = make("tbody", {}, table);
    make("th", { scope: "col" }, head, "layer");
    data().places.forEach((place) => make("th", { scope: "col" }, head, place));
    heat.cells = data().layers.map((layer, row) => {
      const line = make("tr", {}, body);
      make("th", { scope: "row" }, line, layer);
      return data().places.map((_, column) => make("td", { "data-row": row, "data-column": column, tabindex: "-1" }, line));
    });
    host.replaceChildren(table);
    map.classList.toggle("difference", isDifference());
    byId("step").max = data().steps.length - 1;
    heat.row = Math.min(heat.row, data().layers.length - 1);
    heat.column = Math.min(heat.column, data().places.length - 1);
  }

  function paint() {
    const { gauge, step } = heat, reach = heat.reach[gauge];
    heat.cells.forEach((cells, row) => cells.forEach((cell, column) => {
      const value = numberOf(data(), gauge, step, row, placeOf(column));
      const share = value === null ? 0 : shareOf(gauge, value, reach);
      cell.textContent = value === null ? "" : shownFigure(gauge, value);
      cell.style.setProperty("--share", Math.abs(share).toFixed(3));
      cell.classList.toggle("unread", value === null);
      cell.classList.toggle("cool", share < 0);
    }));
    hideUnread(map.querySelector(".heat table"), data(), gauge);
    byId("step-says").textContent = data().steps[step].toLocaleString("en");
    byId("about").textContent = isDifference() ? aboutDifference(data(), gauge) : GAUGES[gauge].about;
    const more = GAUGES[gauge].down && !isDifference() ? " and more" : "";
    [byId("low").textContent, byId("high").textContent] = [inWords(gauge, reach.pale) + more, inWords(gauge, reach.full)];
    const isShown = (row, column) => data().values[gauge][placeOf(column)] && !heat.cells[row][column].parentNode.hidden;
    if (!isShown(heat.row, heat.column)) {
      heat.column = Math.max(0, data().places.findIndex((place) => data().values[gauge][place]));
      heat.row = Math.max(0, heat.cells.findIndex((_, row) => isShown(row, heat.column)));
    }
    choose(heat.row, heat.column);
  }

  function choose(row, column) {
    heat.cells[heat.row]?.[heat.column]?.classList.remove("chosen");
    heat.cells.flat().forEach((cell) => cell.setAttribute("tabindex", "-1"));
    [heat.row, heat.column] = [row, column];
    const cell = heat.cells[row][column];
    cell.classList.add("chosen");
    cell.setAttribute("tabindex", "0");
    byId("said").textContent = cellSays(row, column);
    const name = `${data().layers[row]}, ${placeOf(column)}`;
    const here = data().histograms.filter((h) => h.at[1] === row && h.at[2] === column);
    const found = here.sort((a, b) => Math.abs(a.at[0] - heat.step) - Math.abs(b.at[0] - heat.step))[0];
    drawHistogram(name, found, found && data().steps[found.at[0]], all.length > 1 ? `${RUNS[data().run].name}, ${data().casts[row][column]}` : data().casts[row][column]);
    sayNumbers(map.querySelector(".numbers"), data(), row, placeOf(column));
  }

  wireHeat(map, byId, { take, paint, choose, cellSays, data });
  makeSavers(map.querySelector(".ramp"), () => mapName(data()), null, () => mapRows(data()));
}

const mapName = (data) => `${RUNS[data.run].name}${isDifference() ? ` less ${RUNS[data.other].name}` : ""} ${GAUGES[heat.gauge].title}`;

/** The map that is shown, as rows of cells: every step of the chosen gauge. */
function mapRows(data) {
  const rows = Object.entries(data.values[heat.gauge]).flatMap(([place, steps]) => steps.flatMap((layers, step) => layers.map(
    (value, row) => [data.steps[step], data.layers[row], place, data.casts[row][data.places.indexOf(place)], value])));
  return [["step", "layer", "place", "cast", heat.gauge], ...rows.filter((row) => row[4] !== null)];
}

function aboutDifference({ run, other }, gauge) {
  const [a, b] = [RUNS[run].name, RUNS[other].name], up = GAUGES[gauge].down ? "lower" : "higher";
  return `${GAUGES[gauge].title} of ${a} less that of ${b}, at the same step, layer and place. Orange: ${a} is ${up}; blue: ${b} is ${up}.`;
}

/** Places and layers of which this gauge says nothing at any step are left out. */
function hideUnread(table, data, gauge) {
  const [head, ...lines] = table.rows;
  data.places.forEach((place, column) => {
    for (const line of [head, ...lines]) line.cells[column + 1].hidden = !data.values[gauge][place];
  });
  const rows = Object.values(data.values[gauge]);
  lines.forEach((line, row) => { line.hidden = !rows.some((steps) => steps.some((layers) => layers[row] !== null)); });
}

/** Every gauge of the chosen cell. */
function sayNumbers(host, data, row, place) {
  host.replaceChildren();
  const title = `${data.layers[row]}, ${place}, step ${data.steps[heat.step].toLocaleString("en")}`;
  make("h3", {}, host, isDifference() ? `${title}: difference` : title);
  const list = make("dl", {}, host);
  for (const [gauge, { title }] of Object.entries(GAUGES)) {
    const value = numberOf(data, gauge, heat.step, row, place);
    if (value === null) continue;
    const line = make("div", {}, list);
    make("dt", {}, line, title);
    make("dd", {}, line, inWords(gauge, value));
  }
  if (!list.children.length) make("p", { class: "empty" }, host, "Nothing was read here.");
}

/** What the selects, the slider, the pointer and the arrow keys do. */
function wireHeat(map, byId, { take, paint, choose, cellSays, data }) {
  const read = () => {
    const before = heat.cells.length ? data().steps[heat.step] : undefined;
    const run = Number(byId("run").value), less = Number(byId("less").value);
    if (run !== heat.run || less !== heat.less || !heat.cells.length) {
      take(run, less);
      const at = before === undefined ? data().steps.length - 1 : nearest(data().steps, before);
      byId("step").value = at;
    }
    heat.gauge = byId("gauge").value;
    heat.step = Math.min(Number(byId("step").value), data().steps.length - 1);
    paint();
  };
  map.querySelector(".controls").addEventListener("input", read);
  const table = map.querySelector(".heat");
  const under = (event) => {
    const cell = event.target.closest("td");
    return cell && [Number(cell.dataset.row), Number(cell.dataset.column)];
  };
  table.addEventListener("click", (event) => { const at = under(event); if (at) choose(...at); });
  table.addEventListener("pointerover", (event) => { const at = under(event); if (at) byId("said").textContent = cellSays(...at); });
  table.addEventListener("pointerleave", () => { byId("said").textContent = cellSays(heat.row, heat.column); });
  table.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    let row = heat.row, column = heat.column, cell;
    event.preventDefault();
    do { // over what is hidden
      [row, column] = [row + move[0], column + move[1]];
      cell = heat.cells[row]?.[column];
    } while (cell && (cell.hidden || cell.parentNode.hidden));
    if (!cell) return;
    choose(row, column);
    cell.focus();
  });
  read();
}

/** Where to look first: the cell with the most noise at the last step, of all runs. */
function noisiestCell(all) {
  let worst = { value: Infinity, run: 0, row: 0, column: 0 };
  all.forEach((data, run) => data.places.forEach((place, column) => data.layers.forEach((_, row) => {
    const value = numberOf(data, "sqnr", data.steps.length - 1, row, place);
    const drawn = data.histograms.some((h) => h.at[1] === row && h.at[2] === column);
    if (value !== null && drawn && value < worst.value) worst = { value, run, row, column };
  })));
  return worst;
}

startHeat();
