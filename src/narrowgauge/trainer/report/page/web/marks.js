"use strict";
// How a variant is told from the others: a colour (page.css), a dash pattern and a marker, never colour alone.
// Runs of one variant that differ in their seed look alike.

const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "9 3 2 3 2 3", "1 4"];
const SHAPES = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", // disc
  "M-3.6 -3.6H3.6V3.6H-3.6Z", // square
  "M0 -4.8L4.6 3.4H-4.6Z", // triangle
  "M0 -5.2L5.2 0L0 5.2L-5.2 0Z", // diamond
  "M0 4.8L4.6 -3.4H-4.6Z", // triangle, point down
  "M-1.5 -4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z", // plus
  "M-4.6 -1.4L0 -4.8L4.6 -1.4L2.9 4H-2.9Z", // pentagon
  "M-4.5 -2H4.5V2H-4.5Z", // bar
];
const EVENT_SHAPES = {
  save: "M0 -4V4",
  "save failed": "M-4.5 -4.5H4.5L0 4.5Z",
  start: "M0 -5.5V5.5",
  resume: "M-3.5 -5L4.5 0L-3.5 5Z",
  skip: "M-4 -4L4 4M-4 4L4 -4",
  "not finite": "M0 -5.5L5.5 0L0 5.5L-5.5 0Z",
  stop: "M-4 -4H4V4H-4Z",
  done: "M-4.5 0L-1 3.5L4.5 -4",
  spike: "M-5 4L-1.5 4L0 -5.5L1.5 4L5 4",
  rollback: "M4 -5L-4 0L4 5M4.5 0H-4",
  "precision change": "M-5 -3.5H0V3.5H5",
  change: "M-5 -2.5H5M-5 2.5H5",
  import: "M0 -5.5V3M-3.5 -0.5L0 3.5L3.5 -0.5M-4.5 5.5H4.5",
};
const OTHER_EVENT = "M-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0 -5 0";

const shade = (number) => `run${number % SHAPES.length}`;
// After eight runs the colours come again; the dash moves on by one, so the pair stays unique.
const dash = (number) => DASHES[(number + Math.floor(number / DASHES.length)) % DASHES.length];
const shape = (number) => SHAPES[(number + Math.floor(number / SHAPES.length)) % SHAPES.length];

const SVG = "http://www.w3.org/2000/svg";

/** Make an element, of SVG in a drawing. Text is only ever set as text. */
function make(name, attributes, parent, text) {
  const isDrawn = name === "svg" || parent?.namespaceURI === SVG;
  const node = isDrawn ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

/** A short piece of a variant's line with its marker, for legends and read-outs. */
function swatch(number, parent) {
  const drawing = make("svg", { width: 30, height: 12, "aria-hidden": "true", class: `swatch ${shade(number)}` }, parent);
  make("path", { d: "M1 6H29", class: "line", "stroke-dasharray": dash(number) }, drawing);
  make("path", { d: shape(number), class: "marker", transform: "translate(15 6)" }, drawing);
  return drawing;
}

/** Round places for ticks between two values: steps of 1, 2 or 5 times a power of ten. */
function linearTicks(low, high, wanted) {
  const raw = (high - low) / Math.max(wanted, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999) || raw;
  const first = Math.ceil(low / step - 1e-9);
  const ticks = [];
  for (let i = first; i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return { ticks, step };
}

function logTicks(low, high, wanted) {
  const ticks = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
    for (const m of [1, 2, 5]) {
      const at = m * 10 ** p;
      if (at >= low && at <= high) ticks.push(at);
    }
  if (ticks.length < 3) return linearTicks(low, high, wanted);
  const every = Math.ceil(ticks.length / Math.max(wanted, 2));
  return { ticks: ticks.filter((_, i) => i % every === 0), step: 0 };
}

/**
 * A number in few digits: 12.3 k, 0.0031, 6.0e-7. For ticks, `step` is their distance and `largest` the greatest
 * of them, so that all are written in one unit.
 */
function short(value, step, largest) {
  if (value === 0) return "0";
  const size = Math.abs(largest || value);
  for (const [unit, suffix] of [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e4, " k"]])
    if (size >= unit * 0.99999) {
      const scale = suffix === " k" ? 1e3 : unit;
      const digits = step ? decimals(step / scale) : size / scale < 10 ? 2 : size / scale < 100 ? 1 : 0;
      return (value / scale).toFixed(digits) + suffix;
    }
  if (size < 1e-3) return value.toExponential(step ? Math.max(0, exponent(value) - exponent(step)) : 2);
  return step ? value.toFixed(decimals(step)) : String(+value.toPrecision(4));
}

const exponent = (value) => Math.floor(Math.log10(Math.abs(value)) + 1e-9);
const decimals = (step) => Math.min(8, Math.max(0, -exponent(step)));

/** The unit that suits a duration: its length in seconds, and its name. */
function durationUnit(seconds) {
  return [[86400, " d"], [3600, " h"], [60, " min"]].find(([unit]) => seconds >= 2 * unit) || [1, " s"];
}

/** Seconds as a duration. */
function duration(seconds) {
  const [unit, name] = durationUnit(seconds);
  return +(seconds / unit).toPrecision(3) + name;
}
