// Text with a little Markdown: fenced and inline code, bold, headings. Built of nodes, so that no text is ever markup.

/** Shows a growing text in `container`; only the blocks that have changed are made anew. */
export class Prose {
  #container;
  #shown = [];

  constructor(container) {
    this.#container = container;
  }

  show(text) {
    const blocks = split(text);
    blocks.forEach((block, index) => {
      const old = this.#shown[index];
      if (old?.text === block.text && old.code === block.code) return;
      const made = render(block);
      if (old) this.#container.children[index].replaceWith(made);
      else this.#container.append(made);
    });
    while (this.#container.children.length > blocks.length) this.#container.lastElementChild.remove();
    this.#shown = blocks;
  }
}

function split(text) {
  const blocks = [];
  let block = null;
  for (const line of text.split("\n")) {
    if (line.trimStart().startsWith("```")) {
      block = block?.code ? null : { code: true, lines: [] };
      if (block) blocks.push(block);
    } else if (!block?.code && line.trim() === "") {
      block = null;
    } else {
      if (!block) blocks.push((block = { code: false, lines: [] }));
      block.lines.push(line);
    }
  }
  return blocks.map(({ code, lines }) => ({ code, text: lines.join("\n") }));
}

function render({ code, text }) {
  if (code) return element("pre", element("code", text));
  const heading = /^#{1,6} ([^\n]*)$/.exec(text);
  return heading ? element("h3", ...inline(heading[1])) : element("p", ...inline(text));
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (/^`.+`$/.test(part)) return element("code", part.slice(1, -1));
    if (/^\*\*.+\*\*$/.test(part)) return element("strong", part.slice(2, -2));
    return part;
  });
}

/** A new element with nodes and texts in it; `name` may have classes: "p.note". */
export function element(name, ...content) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag);
  made.classList.add(...classes);
  made.append(...content);
  return made;
}
