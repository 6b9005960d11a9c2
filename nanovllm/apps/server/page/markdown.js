// Turns Markdown that a model wrote into elements. Nothing in it is trusted: HTML is shown as text,
// and what marked makes of the rest passes DOMPurify with a short list of tags.
import { copy, make } from "./dom.js";
import highlight from "./vendor/highlight.js";
import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";

const MAX_HIGHLIGHTED = 40000; // characters of a block of code
const PLAIN_HTML = /^<\/?(?:br|b|i|em|strong|sub|sup|kbd|mark|u|s)\s*\/?>$/i;
const CLEAN = {
  ALLOWED_TAGS: [
    ..."p br hr h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code span a strong em b i del s u".split(" "),
    ..."sub sup kbd mark table thead tbody tr th td".split(" "),
  ],
  ALLOWED_ATTR: ["href", "title", "align", "start", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (character) => ENTITIES[character]);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html({ raw, block }) {
      if (PLAIN_HTML.test(raw.trim())) return raw;
      return block ? this.code({ text: raw.trimEnd(), lang: "html" }) : escaped(raw);
    },
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`, // not loaded
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code({ text, lang }) {
      const name = lang?.match(/^[\w+#-]+/)?.[0] ?? "";
      const known = highlight.getLanguage(name) && text.length <= MAX_HIGHLIGHTED;
      const html = known ? highlight.highlight(text, { language: name, ignoreIllegals: true }).value : escaped(text);
      return `<pre><code class="language-${name}">${html}</code></pre>`;
    },
  },
});

/** Return HTML as elements, without anything that could run or load. */
export function clean(html) {
  const fragment = DOMPurify.sanitize(html, CLEAN);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = make("div", { className: "scrolls", tabIndex: 0, role: "region", ariaLabel: "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  for (const block of fragment.querySelectorAll("pre")) addCodeHeader(block);
  return fragment;
}

function addCodeHeader(block) {
  const code = block.querySelector("code");
  const language = code?.className.replace("language-", "") ?? "";
  const button = make("button", { type: "button", "data-icon": "copy" }, "Copy");
  button.addEventListener("click", async () => {
    await copy(block.textContent.replace(/\n$/, ""));
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  const box = make("div", { className: "codeblock" });
  block.replaceWith(box);
  block.tabIndex = 0;
  box.append(make("div", { className: "row" }, make("span", {}, language), button), block);
}

/** Shows a text that grows: what it has shown of finished blocks stays, and only the rest is made anew. */
export class MarkdownView {
  #element;
  #numDone = 0; // characters in finished blocks
  #rest = []; // the nodes of the others
  #hasDefinitions = false; // of links, which earlier blocks may use

  constructor(element) {
    this.#element = element;
  }

  /** Show a text that begins with the one before. */
  update(text) {
    const tokens = marked.lexer(text.replace(/\r\n?/g, "\n").slice(this.#numDone));
    let numDone = tokens.length - 1; // the last block may go on, after blank lines too
    while (numDone > 0 && tokens[numDone].type === "space") numDone--;
    this.#hasDefinitions ||= tokens.some((token) => token.type === "def");
    for (const node of this.#rest) node.remove();
    for (const token of tokens.splice(0, Math.max(0, numDone))) {
      this.#element.append(this.#made([token]));
      this.#numDone += token.raw.length;
    }
    const fragment = this.#made(tokens);
    this.#rest = [...fragment.childNodes];
    this.#element.append(fragment);
  }

  /** Show the whole text. */
  finish(text) {
    if (this.#hasDefinitions) {
      this.#element.replaceChildren(clean(marked.parse(text)));
    } else {
      this.update(text);
    }
  }

  #made(tokens) {
    return clean(marked.parser(tokens));
  }
}
