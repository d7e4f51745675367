// The live view of the engine, from a stream of snapshots.

import { events, request } from "./api.js";

const KEPT = 120; // steps, and snapshots: a minute of them
const SILENCE_MS = 5000;
const RETRY_MS = [500, 1000, 2000, 4000, 8000];

const at = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, value) => total + value, 0);

let steps = [];
let rates = Array(KEPT).fill(0); // tokens/s between snapshots
let before = null; // the latest snapshot, and when it came
let pointed = null; // place of the pointer in the chart of steps

/** Follow the engine for as long as the page is seen; `greet` gets the first snapshot of every connection. */
export function followEngine(greet) {
  let controller = new AbortController();
  const start = () => {
    controller.abort();
    controller = new AbortController();
    if (!document.hidden) follow(controller.signal, greet);
  };
  document.addEventListener("visibilitychange", start);
  addEventListener("ksana-key", start);
  const chart = at("steps");
  chart.addEventListener("pointermove", (event) => noteStep(Math.floor((event.offsetX / chart.clientWidth) * KEPT)));
  chart.addEventListener("pointerleave", () => noteStep(null));
  start();
}

async function follow(signal, greet) {
  for (let attempt = 0; !signal.aborted; attempt++) {
    try {
      for await (const snapshot of snapshots(signal)) {
        if (before === null) greet(snapshot);
        show(snapshot);
        attempt = 0;
      }
      link("lost", "closed");
    } catch (error) {
      if (signal.aborted) return;
      link("lost", { 401: "needs a key", 429: "too many watch" }[error.status] ?? "not connected");
      if (error.status === 401) return; // there may be a key later
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(attempt, RETRY_MS.length - 1)]));
  }
}

async function* snapshots(signal) {
  const silence = new AbortController();
  const response = await request("engine/stats/stream", { signal: AbortSignal.any([signal, silence.signal]) });
  [steps, before] = [[], null];
  const expectNext = () => setTimeout(() => silence.abort(), SILENCE_MS);
  let timer = expectNext();
  try {
    for await (const snapshot of events(response)) {
      clearTimeout(timer);
      yield snapshot;
      timer = expectNext();
    }
  } finally {
    clearTimeout(timer);
  }
}

function show(now) {
  steps = [...steps, ...now.recent_steps].slice(-KEPT);
  const time = performance.now();
  if (before) {
    const seconds = (time - before.time) / 1000;
    rates = [...rates, Math.max(0, now.output_tokens - before.output_tokens) / seconds].slice(-KEPT);
  }
  before = { output_tokens: now.output_tokens, time };
  link("live", "live");
  text("running", now.num_running);
  text("waiting", now.num_waiting);
  text("rate", Math.round(sum(rates.slice(-2)) / 2));
  text("hits", now.prompt_tokens ? `${Math.round((100 * now.cached_tokens) / now.prompt_tokens)} %` : "–");
  showBlocks(now);
  showSteps();
  showRates();
}

function showBlocks({ blocks_used: used, blocks_cached: cached, blocks_free: free }) {
  const shares = { used, cached, free };
  for (const [name, count] of Object.entries(shares)) {
    at("blocks").querySelector(`.${name}`).style.flexGrow = count;
    text(`blocks-${name}`, count);
  }
  text("blocks-total", `${format(used + cached + free)} blocks`);
  at("blocks").ariaLabel = `${used} blocks used, ${cached} cached, ${free} free`;
}

/** Prompt tokens upwards, decode tokens downwards, each in its own scale: one is hundreds where the other is a few. */
function showSteps() {
  const prefill = steps.map((step) => step.num_prefill_tokens);
  const decode = steps.map((step) => step.num_decode_tokens);
  const [maxPrefill, maxDecode] = [Math.max(0, ...prefill), Math.max(0, ...decode)];
  draw("#steps .prefill", prefill.map((tokens, index) => bar(index, (-54 * tokens) / maxPrefill)));
  draw("#steps .decode", decode.map((tokens, index) => bar(index, (54 * tokens) / maxDecode)));
  text("max-prefill", maxPrefill);
  text("max-decode", maxDecode);
  at("steps").ariaLabel = `${steps.length} steps: ${format(sum(prefill))} prompt, ${format(sum(decode))} decode tokens`;
  noteStep(pointed);
}

function bar(index, height) {
  return height ? `M${4 * (KEPT - steps.length + index) + 0.5} 56h3v${height.toFixed(1)}h-3z` : "";
}

function noteStep(place) {
  pointed = place;
  const step = place === null ? null : steps[place - (KEPT - steps.length)];
  const seconds = sum(steps.map(({ duration_s }) => duration_s)) / steps.length;
  const usual = steps.length ? `${milliseconds(seconds)} on average` : "";
  text("step-note", step ? describe(step) : usual);
}

function describe(step) {
  const tokens = `${step.num_prefill_tokens} + ${step.num_decode_tokens} tokens`;
  return `${tokens} of ${step.num_requests} in ${milliseconds(step.duration_s)}`;
}

function showRates() {
  const highest = Math.max(1, ...rates);
  const heights = rates.map((rate) => (47 - (44 * rate) / highest).toFixed(1));
  const points = heights.map((height, index) => `L${(4 * KEPT * index) / (KEPT - 1)} ${height}`);
  draw("#rates .area", ["M-4 47", ...points, `L${4 * KEPT + 4} 47z`]);
  const peak = Math.round(Math.max(...rates));
  text("rate-peak", peak ? `at most ${format(peak)}` : "");
  at("rates").ariaLabel = `tokens a second: ${Math.round(rates.at(-1))} now, at most ${peak}`;
}

function draw(path, parts) {
  document.querySelector(path).setAttribute("d", parts.join(""));
}

function text(id, value) {
  at(id).textContent = typeof value === "number" ? format(value) : value;
}

function format(value) {
  return value.toLocaleString("en");
}

function milliseconds(seconds) {
  return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

function link(state, words) {
  at("link").dataset.state = state;
  at("link").textContent = words;
}
