// Saves a plot: the picture as SVG, the numbers behind it as CSV. Both are made in the page, without any network.

const PAINT = "fill stroke stroke-width stroke-dasharray stroke-linejoin stroke-linecap opacity font-size font-weight".split(" ");

/** One or both buttons beside a heading. `picture` returns the text of an SVG, `table` rows of cells, the head first. */
function makeSavers(heading, name, picture, table) {
  const host = make("span", { class: "save" }, heading), csv = ["CSV", "text/csv", () => csvOf(table())];
  for (const [kind, type, text] of picture ? [["SVG", "image/svg+xml", picture], csv] : [csv]) {
    const button = make("button", { type: "button", "aria-label": `Save ${name()} as ${kind}` }, host, kind);
    button.addEventListener("click", () => {
      button.setAttribute("aria-label", `Save ${name()} as ${kind}`);
      download(`${fileName(name())}.${kind.toLowerCase()}`, type, text());
    });
  }
}

const fileName = (words) => words.replace(/[^A-Za-z0-9.+-]+/g, "-").replace(/^-|-$/g, "").toLowerCase();

function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = make("a", { href: address, download: name }, document.body);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/** Rows as comma-separated values; what is not known is empty. */
function csvOf(rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",") + "\n").join("");
}

/** A drawing as a file of its own: title above, the colours as they are seen, the names of the runs below. */
function pictureOf(drawing, title, subtitle, keys) {
  const width = Number(drawing.getAttribute("width")), top = 34, line = 20;
  const picture = make("svg", { width, "font-family": "system-ui, sans-serif" }), page = getComputedStyle(document.body);
  make("rect", { width, height: "100%", fill: page.backgroundColor }, picture);
  const words = make("text", { x: 12, y: 20, "font-size": 14, fill: page.color }, picture);
  make("tspan", { "font-weight": 600 }, words, title);
  make("tspan", { dx: 10, "font-size": 12 }, words, subtitle);
  const body = make("g", { transform: `translate(0 ${top})` }, picture);
  body.append(...painted(drawing).childNodes);
  let x = 12, y = top + Number(drawing.getAttribute("height"));
  for (const { look, name } of keys) {
    const size = 44 + 7.2 * name.length;
    if (x + size > width) [x, y] = [12, y + line];
    const own = make("g", { transform: `translate(${x} ${y})` }, picture);
    x += size;
    const hidden = make("div", { class: "away" }, document.body);
    own.append(...painted(swatch(look, hidden)).childNodes);
    hidden.remove();
    make("text", { x: 36, y: 10, "font-size": 12, fill: page.color }, own, name);
  }
  const height = y + (keys.length ? line + 8 : 0);
  picture.setAttribute("height", height);
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return new XMLSerializer().serializeToString(picture);
}

/** A copy of a drawing that needs no style sheet. */
function painted(drawing) {
  const copy = drawing.cloneNode(true);
  copy.querySelectorAll(".cross > *").forEach((node) => node.remove());
  drawing.querySelectorAll(".cross > *").forEach((node) => node.remove());
  const from = [...drawing.querySelectorAll("*")], to = [...copy.querySelectorAll("*")];
  from.forEach((node, i) => {
    const style = getComputedStyle(node);
    for (const name of PAINT) to[i].setAttribute(name, plainColour(style.getPropertyValue(name)));
    to[i].removeAttribute("class");
  });
  return copy;
}

/** A colour as every program reads it: a mixed one is computed as color(srgb ...). */
function plainColour(value) {
  const parts = /^color\(srgb ([\d.e-]+) ([\d.e-]+) ([\d.e-]+)/.exec(value);
  return parts ? `rgb(${parts.slice(1).map((part) => Math.round(255 * Number(part))).join(", ")})` : value;
}
