// Brings the parts of the page together.

import { Conversation } from "./chat.js";
import { followEngine } from "./engine.js";
import { watchTokens } from "./tokens.js";
import { Turn } from "./turn.js";

const at = (id) => document.getElementById(id);
const [log, composer, prompt, settings, panel] = ["log", "composer", "prompt", "settings", "panel"].map(at);
const wide = matchMedia("(min-width: 60rem)");

const conversation = new Conversation();
let running = null; // the AbortController of the answer on its way

/** True if a question can be asked now; if a setting is wrong, it is shown. */
function ready() {
  if (running) return false;
  if (settings.checkValidity()) return true;
  showPanel(true);
  settings.reportValidity();
  return false;
}

async function ask(question) {
  at("welcome").hidden = true;
  const exchange = conversation.begin(question);
  const turn = new Turn(log, question, () => {
    if (!ready()) return;
    conversation.forget(exchange);
    turn.remove();
    ask(question);
  });
  follow(true);
  const controller = (running = new AbortController());
  showRunning(true);
  let end = {};
  try {
    for await (const delta of conversation.ask(exchange, sampling(), controller.signal)) turn.add(delta);
  } catch (error) {
    end = controller.signal.aborted ? { stopped: true } : { error: error.message };
  }
  if (running === controller) showRunning(false);
  turn.end(end);
  say(end.error ?? `Answer complete: ${turn.summary}`);
}

function sampling() {
  const { temperature, top_p, max_tokens, seed, system, logprobs } = settings.elements;
  return {
    temperature: temperature.valueAsNumber,
    top_p: top_p.valueAsNumber,
    max_tokens: max_tokens.valueAsNumber,
    ...(seed.value && { seed: seed.valueAsNumber }),
    system: system.value.trim(),
    logprobs: logprobs.checked,
  };
}

function showRunning(yes) {
  if (!yes) running = null;
  at("send").hidden = yes;
  at("stop").hidden = !yes;
  say(yes ? "The model answers" : "");
}

function say(text) {
  at("status").textContent = text;
}

/** Keep the end of the conversation in sight, unless the reader has scrolled away from it. */
function follow(always) {
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + prompt.offsetHeight - prompt.clientHeight}px`;
}

function showPanel(yes) {
  panel.hidden = !yes;
  document.querySelector("main").inert = yes && !wide.matches;
  at("panel-toggle").ariaExpanded = yes;
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!prompt.value.trim() || !ready()) return;
  const question = prompt.value;
  prompt.value = "";
  fitPrompt();
  ask(question);
});
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  composer.requestSubmit();
});
at("stop").addEventListener("click", () => {
  running?.abort();
  prompt.focus();
});
at("new-chat").addEventListener("click", () => {
  running?.abort();
  conversation.clear();
  log.replaceChildren(at("welcome"));
  at("welcome").hidden = false;
  prompt.focus();
});
at("welcome").addEventListener("click", ({ target }) => target.matches("button") && ready() && ask(target.textContent));
log.addEventListener("grown", () => follow(false));
settings.addEventListener("submit", (event) => event.preventDefault());
settings.addEventListener("input", ({ target }) => {
  if (target.type === "range") target.parentElement.querySelector(".value").textContent = target.value;
});
at("panel-toggle").addEventListener("click", () => {
  showPanel(panel.hidden);
  if (!panel.hidden && !wide.matches) panel.focus();
});
panel.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || wide.matches) return;
  showPanel(false);
  at("panel-toggle").focus();
});
wide.addEventListener("change", () => showPanel(wide.matches));

showPanel(wide.matches);
watchTokens(log, at("tooltip"));
followEngine(({ model, max_model_len: length, has_chat_template: hasTemplate }) => {
  at("model").textContent = model;
  at("model").title = `${model}, up to ${length} tokens`;
  const limit = settings.elements.max_tokens;
  limit.max = length;
  limit.value = Math.min(limit.value, Math.floor(length / 2));
  settings.elements.logprobs.disabled = !hasTemplate;
  conversation.hasTemplate = hasTemplate;
  if (!hasTemplate) at("hint").textContent = "It has no chat template: it goes on with the text that you begin.";
});
