
"use strict";
const byId = (id) => document.getElementById(id);
const PAUSE_MS = 2000;
const LEVELS = { failed: 0, warning: 1, ok: 2 };
// What a curve learns from, as `remoca curve` says it.
const LEARNS = {
  evictions: "evictions are those that the agent reports",
  frames: "evictions are seen in guest memory that reads overwrite, without an agent",
  reads: "no evictions are seen, so this is a cache into which reads are admitted",
};
const UNHEARD = "no agent has reported yet, so no evictions are seen, and this says too little";
let shown = null;                 // the overview that is shown
let order = { key: "name", falls: false };
let selected = null;              // name of the VM with details
const rowsOf = new Map();

function make(tag, text, attributes) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  return element;
}

function size(bytes) {
  const units = ["B", "K", "M", "G", "T"];
  let unit = 0;
  while (bytes >= 1024 && unit + 1 < units.length) { bytes /= 1024; unit += 1; }
  return bytes.toFixed(unit > 0 && bytes < 10 && bytes % 1 > 0.05 ? 1 : 0) + units[unit];
}

const time = (s) => new Date(s * 1000).toISOString().slice(11, 19) + "Z";

function whose(vms) {
  if (vms.length === 0) return "this host";
  return vms.length > 1 ? vms[0] + " and " + (vms.length - 1) + " more" : vms[0];
}

function problemItem(problem, withName) {
  const item = make("li", null, { class: problem.level, "data-cause": problem.cause });
  item.append(make("b", problem.level + (withName ? "  " + whose(problem.vms) : "")));
  item.append(problem.what + ": " + problem.found);
  if (problem.advice) item.append(make("p", problem.advice));
  if (problem.vms.length > 1) item.title = problem.vms.join(", ");
  return item;
}

function showProblems(overview) {
  const list = byId("problems");
  if (overview.problems.length === 0) {
    const text = overview.rows.length === 0
      ? "No VM process runs here: start one with `remoca disk`."
      : "Nothing is wrong with the " + overview.rows.length + " VMs of this host.";
    const item = make("li", null, { class: "ok" });
    item.append(make("b", "ok"), text);
    list.replaceChildren(item);
    return;
  }
  list.replaceChildren(...overview.problems.slice(0, 50).map((problem) => problemItem(problem, true)));
  if (overview.problems.length > 50) list.append(make("li", (overview.problems.length - 50) + " more: `remoca check`"));
}

function showHeadings(columns) {
  if (byId("headings").childElementCount > 0) return;
  const all = [{ key: "name", heading: "VM", meaning: "name of the VM", is_number: false },
    { key: "level", heading: "STATE", meaning: "the worst of what is wrong with it", is_number: false }, ...columns];
  for (const column of all) {
    const heading = make("th", null, { scope: "col", title: column.meaning, "data-key": column.key });
    if (column.is_number) heading.className = "number";
    const button = make("button", column.heading, { type: "button" });
    button.addEventListener("click", () => {
      const falls = order.key === column.key ? !order.falls : column.is_number;
      order = { key: column.key, falls };
      showRows(shown);
    });
    heading.append(button);
    byId("headings").append(heading);
  }
}

function sortValue(row, columns) {
  if (order.key === "name") return row.name;
  if (order.key === "level") return LEVELS[row.level];
  const at = columns.findIndex((column) => column.key === order.key);
  const cell = row.cells[at];
  return columns[at].is_number ? (cell.value === null ? -Infinity : cell.value) : cell.text;
}

function fillRow(element, row, columns) {
  const cells = [make("td", row.level, { class: row.level, "data-key": "level" })];
  row.cells.forEach((cell, at) => {
    const own = make("td", cell.text, { "data-key": columns[at].key });
    if (columns[at].is_number) own.className = "number";
    if (cell.value !== null) own.dataset.value = cell.value;
    cells.push(own);
  });
  element.className = row.cells.every((cell) => cell.value === null) ? "silent" : "";
  // The name keeps the focus that it may have.
  while (element.childElementCount > 1) element.lastElementChild.remove();
  element.append(...cells);
}

function rowElement(row) {
  let element = rowsOf.get(row.name);
  if (!element) {
    element = make("tr", null, { "data-vm": row.name });
    const heading = make("th", null, { scope: "row" });
    const button = make("button", row.name, { type: "button" });
    button.addEventListener("click", () => select(row.name));
    heading.append(button);
    element.append(heading);
    rowsOf.set(row.name, element);
  }
  return element;
}

function showRows(overview) {
  const { columns } = overview;
  const part = byId("only").value.toLowerCase();
  const rows = overview.rows.filter((row) => row.name.toLowerCase().includes(part));
  const collator = new Intl.Collator("en", { numeric: true });
  rows.sort((one, other) => {
    const [a, b] = [sortValue(one, columns), sortValue(other, columns)];
    const compared = typeof a === "string" ? collator.compare(a, b) : a - b;
    return (order.falls ? -compared : compared) || collator.compare(one.name, other.name);
  });
  const names = new Set(overview.rows.map((row) => row.name));
  for (const name of rowsOf.keys()) if (!names.has(name)) rowsOf.delete(name);
  const elements = rows.map((row) => {
    const element = rowElement(row);
    fillRow(element, row, columns);
    return element;
  });
  const body = byId("rows");
  const isSame = body.childElementCount === elements.length && elements.every((element, at) => body.children[at] === element);
  if (!isSame) body.replaceChildren(...elements);
  for (const heading of byId("headings").children) {
    const isOrder = heading.dataset.key === order.key;
    if (isOrder) heading.setAttribute("aria-sort", order.falls ? "descending" : "ascending");
    else heading.removeAttribute("aria-sort");
  }
  byId("total").replaceChildren();
  if (overview.total) {
    const total = make("tr");
    total.append(make("th", "TOTAL", { scope: "row" }));
    fillRow(total, overview.total, columns);
    total.children[1].textContent = "";
    byId("total").append(total);
  }
  const first = overview.rows.filter((row) => row.is_since_start).length;
  byId("note").textContent = first > 0
    ? "Figures of " + first + " VMs are those since their start, until the next snapshot."
    : "Figures are those since the snapshot before.";
}

const SVG = "http://www.w3.org/2000/svg";
function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// A line over points [x, y]; y may be null. Axes have the least and greatest value.
function chart(caption, points, options) {
  const known = points.filter(([, y]) => y !== null);
  const figure = make("figure");
  const [width, height, left, bottom, top] = [460, 150, 58, 20, 8];
  const svg = draw("svg", { viewBox: "0 0 " + width + " " + height, role: "img", "aria-label": caption });
  const most = options.most !== undefined ? options.most : Math.max(...known.map(([, y]) => y), 0) || 1;
  const least = Math.min(0, ...known.map(([, y]) => y));
  const [first, last] = [points.length ? points[0][0] : 0, points.length ? points[points.length - 1][0] : 1];
  const x = (value) => left + (width - left - 8) * (last > first ? (value - first) / (last - first) : 1);
  const y = (value) => top + (height - bottom - top) * (1 - (value - least) / (most - least));
  svg.append(draw("line", { class: "axis", x1: left, x2: width - 8, y1: y(0), y2: y(0) }),
    draw("text", { x: left - 6, y: top + 8, "text-anchor": "end" }, options.label(most)),
    draw("text", { x: left - 6, y: y(least), "text-anchor": "end" }, options.label(least)));
  (options.ticks || []).forEach(([at, text]) => {
    svg.append(draw("text", { x: Math.min(x(at), width - 14), y: height - 5, "text-anchor": "middle" }, text));
  });
  if (options.now !== undefined && options.now >= first && options.now <= last) {
    svg.append(draw("line", { class: "now", x1: x(options.now), x2: x(options.now), y1: top, y2: height - bottom }));
  }
  let path = "";
  let isPen = false;
  for (const [at, value] of points) {
    if (value === null) { isPen = false; continue; }
    path += (isPen ? "L" : "M") + x(at).toFixed(1) + " " + y(value).toFixed(1);
    isPen = true;
  }
  svg.append(draw("path", { class: "data", d: path }));
  if (known.length === 1) svg.append(draw("circle", { class: "data", cx: x(known[0][0]), cy: y(known[0][1]), r: 2 }));
  const newest = known.length ? options.label(known[known.length - 1][1]) : "nothing yet";
  figure.append(svg, make("figcaption", caption + (options.silent ? "" : ": " + newest)));
  return figure;
}

function showHistory(history) {
  const ends = history.length > 1
    ? [[history[0].taken_s, time(history[0].taken_s)], [history[history.length - 1].taken_s, time(history[history.length - 1].taken_s)]]
    : [];
  ends.forEach((end, at) => { end[0] += at === 0 ? (history[history.length - 1].taken_s - history[0].taken_s) * 0.06 : -(history[history.length - 1].taken_s - history[0].taken_s) * 0.06; });
  const line = (caption, value, options) =>
    chart(caption, history.map((moment) => [moment.taken_s, value(moment)]), { ticks: ends, ...options });
  byId("charts").replaceChildren(
    line("Hits, % of the blocks read", (moment) => moment.hit_ratio === null ? null : moment.hit_ratio * 100, { most: 100, label: (v) => v.toFixed(0) + " %" }),
    line("Mean time of a read", (moment) => moment.read_us === null ? null : moment.read_us / 1000, { label: (v) => v.toFixed(2) + " ms" }),
    line("Reads in a second", (moment) => moment.reads_per_s, { label: (v) => v.toFixed(v < 10 ? 1 : 0) }));
}

function learned(from, status) {
  const isUnheard = status && status.figures.agent === "not-heard" && !status.counters.evictions_reported;
  return from === "evictions" && isUnheard ? UNHEARD : LEARNS[from] || from;
}

function showCurve(curve, prospect, status) {
  byId("curve").replaceChildren();
  const body = byId("prospect").tBodies[0];
  body.replaceChildren();
  byId("prospect").hidden = !prospect;
  byId("learned").textContent = prospect ? "" : "Its miss-ratio curve is not known yet: that takes some reads.";
  if (!curve || !prospect) return;
  const sizes = curve.figures.sizes.filter((row) => row.bytes >= 1 << 24);
  const ticks = sizes.filter((row) => Number.isInteger(Math.log2(row.bytes) / 2)).map((row) => [Math.log2(row.bytes), size(row.bytes)]);
  byId("curve").append(chart("Hits, %, with a cache of each size; dashed: the present one",
    sizes.map((row) => [Math.log2(row.bytes), row.hit_ratio * 100]),
    { most: 100, label: (v) => v.toFixed(0) + " %", ticks, now: curve.cache_bytes > 0 ? Math.log2(curve.cache_bytes) : undefined, silent: true }));
  for (const row of prospect.sizes) {
    const line = make("tr");
    line.append(make("td", size(row.bytes) + (row.is_present ? " (now)" : "")), make("td", (row.hit_ratio * 100).toFixed(1)),
      make("td", (row.standard_error * 100).toFixed(1)), make("td", row.read_us === null ? "-" : (row.read_us / 1000).toFixed(2) + " ms"));
    body.append(line);
  }
  byId("learned").textContent = "From " + prospect.blocks_read.toFixed(0) + " blocks read; " + learned(prospect.learns_from, status) +
    "; as of " + time(prospect.taken_s) + ". More: remoca curve " + selected;
}

function pair(list, label, text) {
  list.append(make("dt", label), make("dd", text));
}

async function showDetails() {
  const name = selected;
  if (name === null) return;
  const answer = await fetch("/api/vm/" + encodeURIComponent(name));
  if (name !== selected) return;
  byId("details").hidden = false;
  byId("name").textContent = name;
  if (!answer.ok) {
    byId("own").replaceChildren(make("li", "There is no such VM any longer."));
    return;
  }
  const details = await answer.json();
  byId("details").dataset.snapshot = details.snapshot;
  byId("own").replaceChildren(...details.problems.map((problem) => problemItem(problem, false)));
  showHistory(details.history);
  const status = details.vm.status;
  showCurve(details.curve, details.vm.prospect, status);
  byId("pools").tBodies[0].replaceChildren(...(status ? status.pools : []).map((pool) => {
    const line = make("tr");
    line.append(make("td", pool.server + (pool.is_mapped ? " (this host)" : "")), make("td", pool.is_local_tier ? "local" : "remote"),
      make("td", size(pool.granted_bytes)), make("td", pool.state), make("td", pool.hits),
      make("td", pool.latency_us === null ? "-" : pool.latency_us.toFixed(0) + " us"), make("td", pool.pages_sent), make("td", pool.pages_received));
    return line;
  }));
  byId("lines").replaceChildren();
  details.lines.forEach((line) => pair(byId("lines"), line.label, line.text));
  byId("counters").replaceChildren();
  if (status) Object.entries(status.counters).forEach(([counter, value]) => pair(byId("counters"), counter, value));
}

function select(name) {
  selected = name;
  const place = new URLSearchParams(location.hash.slice(1));
  if (name === null) place.delete("vm"); else place.set("vm", name);
  history.replaceState(null, "", "#" + place);
  if (name === null) byId("details").hidden = true;
  else showDetails().then(() => { byId("name").focus(); byId("details").scrollIntoView(); }).catch(() => {});
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

async function look() {
  try {
    const answer = await fetch("/api/overview");
    if (!answer.ok) throw new Error(answer.status + " " + await answer.text());
    const overview = await answer.json();
    if (!shown || shown.snapshot !== overview.snapshot) {
      shown = overview;
      document.title = (overview.problems.length ? "(" + overview.problems.length + ") " : "") + "remoca " + overview.host;
      byId("host").textContent = overview.host;
      showHeadings(overview.columns);
      showProblems(overview);
      byId("divided").hidden = !overview.host_report;
      byId("divided-text").textContent = overview.host_report ? overview.host_report.text : "";
      showRows(overview);
      await showDetails();
    }
    byId("state").textContent = "Snapshot " + overview.snapshot + " of " + time(overview.taken_s) + ": " + overview.answering + " of " +
      overview.rows.length + " VMs answer";
    byId("state").dataset.snapshot = overview.snapshot;
    byId("state").className = "";
  } catch (error) {
    byId("state").textContent = "`remoca web` does not answer (" + error.message + "). What stands here is old.";
    byId("state").className = "lost";
  }
  setTimeout(look, PAUSE_MS);
}

byId("close").addEventListener("click", () => select(null));
byId("only").addEventListener("input", () => { if (shown) showRows(shown); });
byId("theme").addEventListener("click", () => {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (isDark ? "dark" : "light");
  setTheme(now === "dark" ? "light" : "dark");
});
const start = new URLSearchParams(location.hash.slice(1));
setTheme(start.get("theme"));
selected = start.get("vm");
look();
