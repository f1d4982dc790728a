"use strict";
const find = id => document.getElementById(id);
const {first, colors, samples} = JSON.parse(find("trace").textContent);
const SECONDS = 8;  // a whole sample at normal speed
let sample = samples[0], step = 0, timer = null;

// A position's past: [its text, null while masked; since which step; how often masked again].
function paint(span, past, number) {
  const [text, since, again] = past.findLast(([, since]) => since <= step);
  const isMasked = text === null, isGiven = past[0][0] !== null;
  const isNow = step > 0 && since === step;
  const kinds = {masked: isMasked, given: isGiven && !isMasked, again: isMasked && isNow,
    new: !isMasked && isNow, was: !isMasked && again};
  span.className = Object.keys(kinds).filter(kind => kinds[kind]).join(" ");
  span.textContent = text ?? past.at(-1)[0] ?? "x";
  span.ariaHidden = isMasked ? "true" : null;
  const share = (since - 1) / Math.max(1, sample.num_steps - 1) * (colors.length - 1);
  const [background, ink] = !isMasked && since ? colors[Math.round(share)] : ["", ""];
  span.style.background = background;
  span.style.color = ink;
  const state = isMasked ? "masked" : since ? "since step " + since : "given";
  const times = again === 1 ? "once" : `${again} times`;
  span.title = `position ${number}: ${state}` + (again ? `, masked again ${times}` : "");
  return again;
}

function draw(to) {
  step = Math.min(Math.max(0, to), sample.num_steps);
  const spans = [...find("text").children];
  const again = sample.positions.map((past, i) => paint(spans[i], past, i))
    .reduce((sum, count) => sum + count, 0);
  const gaps = sample.positions.filter(past => past[0][0] === null).length;
  const left = spans.filter(span => span.classList.contains("masked")).length;
  const [number, t, calls] = sample.steps.findLast(([number]) => number <= step);
  find("slider").value = step;
  find("now").textContent = [`step ${step} of ${sample.num_steps}`,
    `${Math.round(gaps ? 100 * (gaps - left) / gaps : 100)} % unmasked`, `${calls} calls`,
    again && `${again} masked again`, number === step && `t ${t.toFixed(3)}`,
  ].filter(Boolean).join(" · ");
}

function choose(number) {
  find("sample").value = Math.min(Math.max(0, number), samples.length - 1);
  sample = samples[find("sample").value];
  find("slider").max = find("last").textContent = sample.num_steps;
  find("text").replaceChildren(...sample.positions.map(() => document.createElement("span")));
  draw(0);
}

function stop() {
  clearTimeout(timer); timer = null;
  find("play").textContent = "▶ Play";
}

function tick() {
  if (step >= sample.num_steps) return stop();
  const wait = 1000 * SECONDS / sample.num_steps / Number(find("speed").value);
  const stride = Math.max(1, Math.round(16 / wait));  // no more frames than a screen shows
  draw(step + stride);
  timer = setTimeout(tick, wait * stride);
}

function play() {
  if (step >= sample.num_steps) draw(0);
  find("play").textContent = "⏸ Pause";
  timer = setTimeout(tick, 400);
}

const toggle = () => timer === null ? play() : stop();
const move = to => { stop(); draw(to); };
find("play").addEventListener("click", toggle);
find("slider").addEventListener("input", event => move(Number(event.target.value)));
find("sample").addEventListener("change", event => { stop(); choose(event.target.value); play(); });
addEventListener("keydown", event => {
  if (["SELECT", "INPUT", "BUTTON"].includes(event.target.tagName)) return;
  if (event.key === " ") { event.preventDefault(); toggle(); }
  if (event.key === "ArrowRight") move(step + 1);
  if (event.key === "ArrowLeft") move(step - 1);
});

// page.html#sample=2&step=40 shows that moment; otherwise the page plays, unless motion is unwanted
const asked = new URLSearchParams(location.hash.slice(1));
choose(parseInt(asked.get("sample")) || (asked.has("sample") ? 0 : first));
if (asked.has("step")) move(parseInt(asked.get("step")) || 0);
else if (!matchMedia("(prefers-reduced-motion: reduce)").matches) play();
