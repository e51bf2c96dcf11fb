// A page that is written again while its runs train: it loads itself again, and keeps what the reader has chosen.

const EVERY_MS = 4000, LATE_S = 300;
let STORE = null;
try { STORE = sessionStorage; } catch { /* some browsers keep nothing for files */ }
const PLACE = `narrowgauge ${location.pathname}`;
const each = (selector) => [...document.querySelectorAll(selector)];
const nameOf = (input) => input.id || input.value;
const isBox = (input) => input.type === "checkbox" || input.type === "radio";
const isDefault = (input) => (input.type === "radio" && !input.checked) || (input.id === "heat-step" && input.value === input.max); // the last step stays the last

function remember() {
  const inputs = each("input, select").filter((input) => !isDefault(input));
  STORE.setItem(PLACE, JSON.stringify({
    inputs: inputs.map((input) => [nameOf(input), isBox(input) ? input.checked : input.value]),
    hidden: each(".legend button[aria-pressed=false]").map((button) => button.textContent),
    open: each("details[open] > summary").map((summary) => summary.textContent),
    scrolled: each(".scroll, pre").map((node) => [node.scrollLeft, node.scrollTop]),
    at: [scrollX, scrollY],
  }));
}

function recall() {
  const was = JSON.parse(STORE.getItem(PLACE));
  if (!was) return;
  for (const [name, value] of was.inputs) {
    const input = each("input, select").find((one) => nameOf(one) === name);
    if (!input || (input.options && ![...input.options].some((option) => option.value === value && !option.disabled))) continue;
    if (isBox(input)) input.checked = value; else input.value = value;
    input.dispatchEvent(new Event("input", { bubbles: true }));
  }
  each(".legend button").forEach((button) => { if (was.hidden.includes(button.textContent)) button.click(); });
  each("details").forEach((node) => { node.open = was.open.includes(node.querySelector("summary").textContent); });
  each(".scroll, pre").forEach((node, i) => { [node.scrollLeft, node.scrollTop] = was.scrolled[i] || [0, 0]; });
  scrollTo(...was.at);
}

const secondsSince = (time) => Math.max(0, (Date.now() - Date.parse(time.dateTime)) / 1000);
function age(seconds) {
  const [unit, name] = durationUnit(seconds);
  return `${Math.floor(seconds / unit)}${name} ago`;
}

/** Times as ages; where the page itself is old, nobody writes it any more. */
function sayAges() {
  each(".standing time").forEach((time) => {
    time.title = time.title || time.textContent;
    time.textContent = age(secondsSince(time));
  });
  const live = document.getElementById("live"), isLate = secondsSince(live) > LATE_S;
  live.className = isLate ? "lost" : "";
  live.textContent = isLate ? `written ${age(secondsSince(live))}: the watcher has ended, and this is what it showed last` : "live";
}

if (STORE) {
  recall();
  addEventListener("pagehide", remember);
}
sayAges();
setInterval(sayAges, 1000);
setInterval(() => { if (!document.hidden) location.reload(); }, EVERY_MS);
