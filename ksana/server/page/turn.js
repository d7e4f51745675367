// One question and its answer on the page.

import { element, Prose } from "./prose.js";
import { Tokens } from "./tokens.js";

const ENDS = { length: "cut at max tokens", abort: "ended by the server", stopped: "stopped" };

export class Turn {
  #article = element("article.answer");
  #body = element("div.text");
  #thoughts = element("details.thoughts", element("summary", "Reasoning"), element("div.text"));
  #note = element("footer");
  #prose = new Prose(this.#body);
  #tokens = null;
  #text = "";
  #count = 0;
  #began = performance.now();
  #first = 0;
  #last = 0;
  #finish = null;
  #painting = 0;

  constructor(log, question, again) {
    this.again = again;
    this.#article.setAttribute("aria-busy", "true");
    this.#article.append(this.#thoughts, this.#body, this.#note);
    this.#thoughts.hidden = true;
    log.append(element("article.question", question), this.#article);
  }

  add({ content, reasoning, logprobs, finish, usage }) {
    if (reasoning) {
      this.#thoughts.hidden = false;
      this.#thoughts.lastElementChild.append(reasoning);
    }
    if (logprobs?.length) (this.#tokens ??= this.#begin()).add(logprobs);
    if (content) this.#text += content;
    if (content || reasoning || logprobs?.length) {
      this.#last = performance.now();
      this.#first ||= this.#last;
      this.#count += logprobs?.length || 1;
    }
    this.#finish = finish ?? this.#finish;
    this.#count = usage?.completion_tokens ?? this.#count;
    this.#painting ||= requestAnimationFrame(() => this.#paint());
  }

  /** The answer is over: for the reason that the server gave, because it was `stopped`, or because of an `error`. */
  end({ stopped, error } = {}) {
    cancelAnimationFrame(this.#painting);
    if (stopped) this.#finish = "stopped";
    this.#paint();
    this.#article.removeAttribute("aria-busy");
    if (error) this.#article.insertBefore(element("p.error", error), this.#note);
    const [copy, again] = [this.#button("Copy", () => this.#copy(copy)), this.#button("Again", () => this.again())];
    this.#note.append(element("span.buttons", copy, again));
    this.#announceGrowth();
  }

  remove() {
    this.#article.previousElementSibling.remove();
    this.#article.remove();
  }

  /** "42 tokens · 31.2 tokens/s" and so on. */
  get summary() {
    const seconds = (this.#last - this.#first) / 1000;
    return [
      this.#count && `${this.#count} ${this.#count === 1 ? "token" : "tokens"}`,
      this.#count > 1 && seconds > 0 && `${((this.#count - 1) / seconds).toFixed(1)} tokens/s`,
      this.#first && `first after ${((this.#first - this.#began) / 1000).toFixed(2)} s`,
      ENDS[this.#finish],
    ]
      .filter(Boolean)
      .join(" · ");
  }

  #begin() {
    this.#body.replaceChildren();
    this.#body.classList.add("tokens");
    return new Tokens(this.#body);
  }

  #paint() {
    this.#painting = 0;
    if (!this.#tokens) this.#prose.show(this.#text);
    this.#note.replaceChildren(element("span", this.summary));
    this.#announceGrowth();
  }

  #announceGrowth() {
    this.#article.dispatchEvent(new Event("grown", { bubbles: true }));
  }

  #button(name, action) {
    const button = element("button.quiet", name);
    button.type = "button";
    button.addEventListener("click", action);
    return button;
  }

  async #copy(button) {
    try {
      await navigator.clipboard.writeText(this.#text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed"; // the clipboard needs HTTPS or localhost
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
}
