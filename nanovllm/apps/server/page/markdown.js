// Turns Markdown that a model wrote into elements. Nothing in it is trusted: HTML is shown as text,
// and what markdown-it makes of the rest passes DOMPurify with a short list of tags.
import { copy, make } from "./dom.js";
import highlight from "./vendor/highlight.js";
import MarkdownIt from "./vendor/markdown-it.js";
import DOMPurify from "./vendor/purify.js";

const MAX_HIGHLIGHTED = 20000; // characters of a block of code
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

const markdown = new MarkdownIt({ html: true, linkify: true, breaks: true }); // its HTML is replaced here:
const escaped = markdown.utils.escapeHtml;
Object.assign(markdown.renderer.rules, {
  html_inline: (tokens, index) => plain(tokens[index].content) ?? escaped(tokens[index].content),
  html_block: (tokens, index) => plain(tokens[index].content) ?? codeBlock(tokens[index].content, "html"),
  fence: (tokens, index) => codeBlock(tokens[index].content, tokens[index].info),
  code_block: (tokens, index) => codeBlock(tokens[index].content, ""),
  image: (tokens, index) => { // is not loaded
    const { content, attrs } = tokens[index], source = escaped(new Map(attrs).get("src"));
    return `<a href="${source}">${escaped(content) || source}</a>`;
  },
});
for (const tag of ["th", "td"]) {
  markdown.renderer.rules[`${tag}_open`] = (tokens, index) => {
    const align = tokens[index].attrGet("style")?.replace("text-align:", "");
    return align ? `<${tag} align="${align}">` : `<${tag}>`;
  };
}
markdown.core.ruler.push("tasks", ({ tokens }) => {
  tokens.forEach(({ type, children }, index) => {
    if (type !== "inline" || tokens[index - 2]?.type !== "list_item_open" || !children.length) return;
    children[0].content = children[0].content.replace(/^\[([ x])\] /i, (_, mark) => (mark === " " ? "☐ " : "☑ "));
  });
});

const plain = (html) => (PLAIN_HTML.test(html.trim()) ? html : null);

function codeBlock(text, info) {
  const language = info.match(/^[\w+#-]+/)?.[0] ?? "";
  const known = highlight.getLanguage(language) && text.length <= MAX_HIGHLIGHTED;
  const html = known ? highlight.highlight(text, { language, ignoreIllegals: true }).value : escaped(text);
  return `<pre><code class="language-${language}">${html}</code></pre>`;
}

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

/** Shows a text that grows: finished blocks stay as they are, and only the last one is made anew. */
export class MarkdownView {
  #element;
  #numDone = 0; // characters in finished blocks
  #last = []; // the nodes of the last block
  #state = {}; // markdown-it's: the definitions of links

  constructor(element) {
    this.#element = element;
  }

  /** Show a text that begins with the one before. */
  update(text) {
    const rest = text.replace(/\r\n?/g, "\n").slice(this.#numDone);
    const tokens = markdown.parse(rest, this.#state);
    const index = tokens.findLastIndex((token) => token.level === 0 && token.nesting >= 0);
    for (const node of this.#last) node.remove();
    if (index > 0) {
      this.#element.append(this.#made(tokens.splice(0, index)));
      this.#numDone += rest.split("\n", tokens[0].map[0]).join("\n").length + 1;
    }
    const fragment = this.#made(tokens);
    this.#last = [...fragment.childNodes];
    this.#element.append(fragment);
  }

  /** Show the whole text: blocks may use links that are defined after them. */
  finish(text) {
    if (this.#state.references) this.#element.replaceChildren(clean(markdown.render(text)));
    else this.update(text);
  }

  #made(tokens) {
    return clean(markdown.renderer.render(tokens, markdown.options, this.#state));
  }
}
