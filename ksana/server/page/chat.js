// The conversation, and the request for its next answer.

import { events, request } from "./api.js";

/** Exchanges of a question and an answer. Those without an answer (refused, stopped at once) are not sent again. */
export class Conversation {
  hasTemplate = true;
  #exchanges = [];

  begin(question) {
    const exchange = { question, answer: "" };
    this.#exchanges.push(exchange);
    return exchange;
  }

  forget(exchange) {
    this.#exchanges = this.#exchanges.filter((other) => other !== exchange);
  }

  clear() {
    this.#exchanges = [];
  }

  /** Yield what comes: `{content, reasoning, logprobs, finish, usage}`, each of them only where there is some. */
  async *ask(exchange, { system, logprobs, ...sampling }, signal) {
    const before = this.#exchanges.slice(0, this.#exchanges.indexOf(exchange)).filter(({ answer }) => answer);
    const body = { ...sampling, stream: true, stream_options: { include_usage: true } };
    let path = "v1/chat/completions";
    if (this.hasTemplate) {
      body.messages = messagesOf([...before, exchange], system);
      if (logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    } else {
      path = "v1/completions";
      body.prompt = textOf([...before, exchange], system);
    }
    for await (const chunk of events(await request(path, { body, signal }))) {
      const [choice] = chunk.choices;
      const delta = choice?.delta ?? { content: choice?.text };
      exchange.answer += delta.content ?? "";
      yield {
        content: delta.content,
        reasoning: delta.reasoning_content,
        logprobs: choice?.logprobs?.content,
        finish: choice?.finish_reason,
        usage: chunk.usage,
      };
    }
  }
}

function messagesOf(exchanges, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { question, answer } of exchanges) {
    messages.push({ role: "user", content: question });
    if (answer) messages.push({ role: "assistant", content: answer });
  }
  return messages;
}

/** What a model without a chat template goes on with: the text so far. */
function textOf(exchanges, system) {
  const texts = exchanges.map(({ question, answer }) => question + answer);
  return [...(system ? [system] : []), ...texts].join("\n");
}
