// A live page: asks its server for itself, and takes over what has changed. The reader's place, choices and pointer stay.

const EVERY = { seen: 2000, hidden: 20000, lost: 5000 }; // milliseconds
const main = document.querySelector("main"), said = document.getElementById("live");
const served = {}; // the HTML of each part as it was served, before scripts changed it
let tag = main.dataset.tag, gaugeText = JSON.stringify(DATA.gauges);

const ages = [[86400, "d"], [3600, "h"], [60, "min"], [0, "s"]];
function age(seconds) {
  const [unit, name] = ages.find(([least]) => seconds >= least);
  return `${Math.floor(seconds / (unit || 1))} ${name} ago`;
}

/** Times as ages, which grow while nothing is recorded. */
function sayAges() {
  document.querySelectorAll(".standing time").forEach((node) => {
    node.title = node.title || node.textContent;
    node.textContent = age(Math.max(0, (Date.now() - Date.parse(node.dateTime)) / 1000));
  });
}

/** Replaces a part, with what is open and how far it is scrolled as before. */
function replacePart(old, fresh) {
  const name = old.dataset.part, html = fresh.innerHTML;
  if (served[name] === html) return;
  served[name] = html;
  const key = (node) => node.querySelector("summary")?.textContent;
  const open = new Set([...old.querySelectorAll("details[open]")].map(key));
  const scrolled = [...old.querySelectorAll(".scroll, pre")].map((node) => [node.scrollLeft, node.scrollTop]);
  const checked = [...old.querySelectorAll("input[id]")].map((node) => [node.id, node.checked]);
  old.replaceChildren(...fresh.childNodes);
  old.querySelectorAll("details").forEach((node) => { node.open = open.has(key(node)); });
  old.querySelectorAll(".scroll, pre").forEach((node, i) => { [node.scrollLeft, node.scrollTop] = scrolled[i] || [0, 0]; });
  checked.forEach(([id, on]) => { const box = document.getElementById(id); if (box) box.checked = on; });
  markKeys(old);
}

function take(text) {
  const page = new DOMParser().parseFromString(text, "text/html"), first = VARIANTS[0];
  const next = page.querySelector("main"), data = page.getElementById("data").textContent;
  const names = (root) => [...root.querySelectorAll("[data-part]")].map((node) => node.dataset.part).join();
  takeData(data);
  // Another set of charts, or another reference: as a new page. The browser keeps the place.
  if (next.dataset.shape !== main.dataset.shape || VARIANTS[0] !== first || names(next) !== names(main)) return location.reload();
  document.title = page.title;
  main.querySelectorAll("[data-part]").forEach((old) => replacePart(old, next.querySelector(`[data-part="${old.dataset.part}"]`)));
  drawAgain();
  const gauges = JSON.stringify(DATA.gauges);
  if (gauges !== gaugeText) restartHeat(next.querySelector(".map"));
  gaugeText = gauges;
  tag = next.dataset.tag;
  sayAges();
}

async function follow() {
  let wait = document.hidden ? EVERY.hidden : EVERY.seen, text = null;
  try {
    const answer = await fetch(location.href, { headers: { "If-None-Match": `"${tag}"` }, cache: "no-store" });
    if (answer.status === 200) text = await answer.text();
    else if (answer.status !== 304) throw new Error(answer.statusText);
    said.textContent = "live";
    said.className = "";
  } catch {
    wait = EVERY.lost;
    said.textContent = "not followed: the watcher has ended, and this is what it showed last";
    said.className = "lost";
  }
  setTimeout(follow, wait);
  if (text !== null) take(text);
}

if (location.protocol.startsWith("http")) {
  sayAges();
  setInterval(sayAges, 1000);
  setTimeout(follow, EVERY.seen);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) sayAges(); });
} else said.textContent = "saved";
