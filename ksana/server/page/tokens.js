// Tokens coloured by their probability. Pointing at one, or going there with the arrow keys, shows what else it might
// have been.

import { element } from "./prose.js";

const alternatives = new WeakMap(); // of a token's element

export class Tokens {
  #container;
  #decoder = new TextDecoder();

  constructor(container) {
    this.#container = container;
  }

  /** Add entries of `choices[].logprobs.content`. */
  add(entries) {
    for (const entry of entries) {
      // A character may be spread over several tokens; the last of them shows it.
      const text = entry.bytes ? this.#decoder.decode(Uint8Array.from(entry.bytes), { stream: true }) : entry.token;
      if (!text) continue;
      const token = element("span.token", text);
      token.style.setProperty("--p", Math.exp(entry.logprob).toFixed(4));
      token.tabIndex = this.#container.hasChildNodes() ? -1 : 0;
      token.setAttribute("aria-describedby", "tooltip");
      alternatives.set(token, entry);
      this.#container.append(token);
    }
  }
}

/** Show and hide the tooltip for all tokens within `root`. */
export function watchTokens(root, tooltip) {
  const hide = () => (tooltip.hidden = true);
  const show = ({ target }) => (alternatives.has(target) ? place(tooltip, target) : hide());
  root.addEventListener("pointerover", show);
  root.addEventListener("pointerleave", hide);
  root.addEventListener("focusin", show);
  root.addEventListener("focusout", hide);
  root.addEventListener("scroll", hide, { passive: true });
  root.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const target = next && alternatives.has(event.target) && event.target[next];
    if (!target) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    target.tabIndex = 0;
    target.focus();
  });
}

function place(tooltip, token) {
  const entry = alternatives.get(token);
  const others = (entry.top_logprobs ?? []).filter(({ token }) => token !== entry.token);
  const rows = [entry, ...others].sort((a, b) => b.logprob - a.logprob);
  tooltip.replaceChildren(...rows.map((row) => describe(row, row === entry)));
  tooltip.hidden = false;
  const box = token.getClientRects()[0];
  const left = Math.min(box.left, innerWidth - tooltip.offsetWidth - 8);
  const above = box.top - tooltip.offsetHeight - 6;
  tooltip.style.left = `${Math.max(8, left)}px`;
  tooltip.style.top = `${above > 8 ? above : box.bottom + 6}px`;
}

function describe({ token, logprob }, chosen) {
  const probability = Math.exp(logprob);
  const shown = token.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
  const row = element(chosen ? "p.chosen" : "p", element("span", shown), element("b", percent(probability)));
  row.style.setProperty("--p", probability.toFixed(4));
  return row;
}

function percent(probability) {
  return probability > 0 && probability < 0.0005 ? "< 0.1 %" : `${(probability * 100).toFixed(1)} %`;
}
