"""Style and script of the animated page: kept apart from the page, both are embedded in it."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1c1c; --soft: #5a5a5a; --line: #d8d8d8;
  --mask: #d3d6db; --again: #d1242f; --panel: #f5f6f8; --accent: #0a58ca; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --ink: #ececec; --soft: #a5a9b0;
  --line: #3a3d44; --mask: #3b3f48; --again: #ff6b6b; --panel: #1d2026; --accent: #6ea8fe; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1000px; padding: 1rem;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
p { margin: .3rem 0; } small, .soft { color: var(--soft); }
.bar { display: flex; flex-wrap: wrap; gap: .5rem .8rem; align-items: center;
  background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem;
  margin: .8rem 0; }
.bar label { display: flex; gap: .4rem; align-items: center; min-width: 0; max-width: 100%; }
.bar select { min-width: 0; max-width: 100%; }
button, select { font: inherit; color: inherit; background: var(--paper); padding: .2rem .7rem;
  border: 1px solid var(--line); border-radius: 6px; }
button { min-width: 5.2rem; cursor: pointer; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
input[type=range] { flex: 1 1 12rem; min-width: 8rem; accent-color: var(--accent); }
#now { font-variant-numeric: tabular-nums; width: 100%; }
.text { font: .95rem/1.9 ui-monospace, "DejaVu Sans Mono", Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: 8px; padding: .8rem; min-height: 6rem; }
.text span { border-radius: 3px; padding: 2px 0; box-decoration-break: clone;
  -webkit-box-decoration-break: clone; }
.given { text-decoration: underline; text-decoration-color: var(--soft);
  text-underline-offset: 4px; }
.masked { color: transparent; background: var(--mask); user-select: none; }
.masked.again { background: repeating-linear-gradient(135deg, var(--mask) 0 3px,
  var(--again) 3px 5px); }
.was { box-shadow: inset 0 -2px 0 var(--again); }
.new { outline: 2px solid var(--ink); outline-offset: 0; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; align-items: center;
  font-size: .85rem; margin: .6rem 0; }
.legend span.key { font: .85rem ui-monospace, "DejaVu Sans Mono", monospace; padding: 1px 5px;
  border-radius: 3px; }
.ramp { display: inline-block; width: 9rem; height: .8rem; border-radius: 3px;
  vertical-align: middle; margin: 0 .3rem; }
pre { background: var(--panel); padding: .6rem; font-size: .85rem; white-space: pre-wrap;
  overflow-wrap: anywhere; border-radius: 6px; margin: .3rem 0 .8rem; }
table { border-collapse: collapse; font-size: .85rem; }
td { border-bottom: 1px solid var(--line); padding: .2rem .8rem .2rem 0; vertical-align: top;
  overflow-wrap: anywhere; }
"""

SCRIPT = """
"use strict";
const trace = JSON.parse(document.getElementById("trace").textContent);
const find = id => document.getElementById(id);
const SECONDS = 8;  // a whole sample at normal speed
let sample = 0, step = 0, timer = null, places = [];

// What each position shows after a step: text or null, since when, how often masked again.
function replay(row, until) {
  const now = row.tokens.map(text => ({text, since: 0, again: 0, isNew: false, isLost: false}));
  let calls = 0, t = until === 0 ? 1 : null;
  for (const change of row.steps) {
    if (change.number > until) break;
    const isLast = change.number === until;
    for (const i of change.unset) {
      now[i] = {text: null, since: 0, again: now[i].again + 1, isNew: false, isLost: isLast};
    }
    for (const [i, text] of change.set) {
      now[i] = {text, since: change.number, again: now[i].again, isNew: isLast, isLost: false};
    }
    calls = change.calls; t = isLast ? change.t : null;
  }
  return {now, calls, t};
}

function paint(span, place, given, placeholder, numSteps, position) {
  const isMasked = place.text === null;
  const names = [isMasked ? "masked" : given ? "given" : "shown"];
  if (place.isLost) names.push("again");
  if (!isMasked && place.again) names.push("was");
  if (place.isNew) names.push("new");
  span.className = names.join(" ");
  span.textContent = isMasked ? placeholder : place.text;
  if (isMasked) span.setAttribute("aria-hidden", "true");
  else span.removeAttribute("aria-hidden");
  const last = trace.colours.length - 1;
  const share = numSteps > 1 ? (place.since - 1) / (numSteps - 1) : 0;
  const colour = !isMasked && place.since ? trace.colours[Math.round(share * last)] : null;
  span.style.background = colour ? colour[0] : "";
  span.style.color = colour ? colour[1] : "";
  const times = place.again === 1 ? "once" : place.again + " times";
  span.title = "position " + position + (isMasked ? ": masked" : given ? ": given"
    : ": since step " + place.since) + (place.again ? ", masked again " + times : "");
}

function draw() {
  const row = trace.samples[sample];
  const {now, calls, t} = replay(row, step);
  now.forEach((place, i) => paint(
    places[i], place, row.given[i], row.last[i], row.num_steps, i));
  const gaps = row.given.filter(given => !given).length;
  const filled = now.filter((place, i) => !row.given[i] && place.text !== null).length;
  const again = now.reduce((sum, place) => sum + place.again, 0);
  const share = gaps ? Math.round(100 * filled / gaps) : 100;
  find("slider").value = step;
  find("now").textContent = "step " + step + " of " + row.num_steps + " \\u00b7 " + share +
    " % unmasked \\u00b7 " + calls + " calls" +
    (again ? " \\u00b7 " + again + " masked again" : "") +
    (t === null ? "" : " \\u00b7 t " + t.toFixed(3));
}

function choose(number) {
  sample = Math.min(Math.max(0, number), trace.samples.length - 1);
  const row = trace.samples[sample];
  find("sample").value = sample;
  find("slider").max = row.num_steps;
  find("lastlabel").textContent = row.num_steps;
  places = row.tokens.map(() => document.createElement("span"));
  find("text").replaceChildren(...places);
  step = Math.min(step, row.num_steps);
  draw();
}

function stop() {
  clearTimeout(timer); timer = null;
  find("play").textContent = "\\u25b6 Play";
}

function tick() {
  const numSteps = trace.samples[sample].num_steps;
  if (step >= numSteps) { stop(); return; }
  const wait = 1000 * SECONDS / Math.max(1, numSteps) / Number(find("speed").value);
  const stride = Math.max(1, Math.round(16 / wait));
  step = Math.min(numSteps, step + stride);
  draw();
  timer = setTimeout(tick, wait * stride);
}

function play() {
  if (step >= trace.samples[sample].num_steps) { step = 0; draw(); }
  find("play").textContent = "\\u23f8 Pause";
  timer = setTimeout(tick, 400);
}

function move(to) {
  stop();
  step = Math.min(Math.max(0, to), trace.samples[sample].num_steps);
  draw();
}

find("play").addEventListener("click", () => timer === null ? play() : stop());
find("slider").addEventListener("input", event => move(Number(event.target.value)));
find("sample").addEventListener("change", event => {
  stop(); step = 0; choose(Number(event.target.value)); play();
});
addEventListener("keydown", event => {
  if (["SELECT", "INPUT", "BUTTON"].includes(event.target.tagName)) return;
  if (event.key === " ") { event.preventDefault(); timer === null ? play() : stop(); }
  if (event.key === "ArrowRight") move(step + 1);
  if (event.key === "ArrowLeft") move(step - 1);
});

// page.html#sample=2&step=40 shows that moment; otherwise the page plays, unless motion is unwanted
const asked = new URLSearchParams(location.hash.slice(1));
const whole = (name, otherwise) =>
  /^[0-9]+$/.test(asked.get(name) || "") ? Number(asked.get(name)) : otherwise;
choose(whole("sample", trace.first));
document.body.classList.add("ready");
if (asked.has("step")) move(whole("step", 0));
else if (!matchMedia("(prefers-reduced-motion: reduce)").matches) play();
"""
