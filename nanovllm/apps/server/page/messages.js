// Shows messages: Markdown, reasoning, tool calls, what an answer took, and the buttons below each.
import { copy, iconButton, make } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { thumbnails } from "./pictures.js";

const digits = (value, most = 0) => value.toLocaleString("en", { maximumFractionDigits: most });
const ENDS = { stopped: "stopped", length: "cut off: the most tokens are reached" };

/** Return the text below an answer: its model, tokens and times. */
function noteOf({ model, stats, finish_reason: reason, error }, isRunning) {
  const words = isRunning ? [] : [model];
  if (stats) {
    words.push(`${digits(stats.output)} tokens`);
    if (stats.rate) words.push(`${digits(stats.rate, stats.rate < 10 ? 1 : 0)} tokens/s`);
    if (stats.first !== null) words.push(`first after ${digits(stats.first)} ms`);
  }
  if (!isRunning && !error) words.push(reason ? ENDS[reason] : "interrupted");
  return words.filter(Boolean).join(" · ");
}

/** A message of the user: text as it was typed. */
export function userView(message, onEdit) {
  const text = make("div", { className: "bubble", dir: "auto" }, message.content);
  const seen = message.pictures ? [thumbnails(message.pictures)] : [];
  const actions = make("div", { className: "row actions" }, copyButton(() => message.content));
  if (onEdit) actions.append(iconButton("edit", "Edit", onEdit));
  return make("article", { className: "user", "aria-label": "You" }, ...seen, text, actions);
}

/** A result of a tool. */
export const resultView = (message) => make("article", { className: "tool", "aria-label": "Result of a tool" },
  make("details", {}, make("summary", {}, "Result"), make("pre", { tabIndex: 0 }, message.content)));

function copyButton(text) {
  const button = iconButton("copy", "Copy", async () => {
    await copy(text());
    button.dataset.icon = "check";
    setTimeout(() => { button.dataset.icon = "copy"; }, 1500);
  });
  return button;
}

/** A field below the message for its new text. */
export function editor(content, onSave, onCancel) {
  const area = make("textarea", { value: content, "aria-label": "Edit the message" });
  const form = make("form", { className: "editor" }, area, make("div", { className: "row end" },
    make("button", { type: "button", onclick: onCancel }, "Cancel"),
    make("button", { className: "primary" }, "Send")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim()) onSave(area.value.trim());
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); onCancel(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  return form;
}

/** An answer, which may grow: `update` shows what is new of it, `finish` its end. */
export class AnswerView {
  #message;
  #content = make("div", { className: "markdown", dir: "auto" });
  #markdown = new MarkdownView(this.#content);
  #thoughts = make("div", { className: "thoughts", dir: "auto" });
  #thinking = make("summary", {}, "Reasoning");
  #reasoning = make("details", { hidden: true }, this.#thinking, this.#thoughts);
  #calls = make("div", { className: "calls" });
  #note = make("span", { className: "note" });
  #end = make("div", { className: "row actions" }, this.#note);
  element = make("article", { className: "answer running", "aria-label": "Answer", "aria-busy": "true" },
    this.#reasoning, this.#content, this.#calls, this.#end);

  constructor(message) {
    this.#message = message;
  }

  update() {
    const message = this.#message;
    this.#showReasoning(true);
    if (message.content) this.#markdown.update(message.content);
    this.#showCalls();
    this.#note.textContent = noteOf(message, true);
    this.element.classList.toggle("waiting", !message.content && !message.tool_calls);
  }

  /**
   * Show the end. `actions` has `again`, and `results` if the tools' results can be given now; without
   * `actions` the answer is an earlier one.
   */
  finish(actions) {
    const message = this.#message;
    this.element.classList.remove("running", "waiting");
    this.element.removeAttribute("aria-busy");
    this.#showReasoning(false);
    this.#markdown.finish(message.content);
    this.#showCalls();
    this.#note.textContent = noteOf(message, false);
    this.#end.replaceChildren(copyButton(() => message.content || JSON.stringify(message.tool_calls)));
    if (actions) this.#end.append(iconButton("again", "Answer again (Ctrl+Shift+Enter)", actions.again));
    this.#end.append(this.#note);
    if (message.error) {
      const retry = actions && make("button", { type: "button", onclick: actions.again }, "Try again");
      this.#end.before(make("div", { className: "failure", role: "alert" }, make("span", {}, message.error), retry ?? ""));
    } else if (message.tool_calls && actions) {
      this.#calls.append(this.#resultForm(actions.results));
    }
  }

  #showReasoning(isRunning) {
    const { reasoning, content } = this.#message;
    this.#reasoning.hidden = !reasoning;
    this.#thinking.textContent = isRunning && !content ? "Reasoning …" : "Reasoning";
    const shown = this.#thoughts.textContent.length;
    if (reasoning) this.#thoughts.append(reasoning.slice(shown));
  }

  #showCalls() {
    for (const [index, { function: { name, arguments: text } }] of (this.#message.tool_calls ?? []).entries()) {
      const box = this.#calls.children[index] ?? this.#calls.appendChild(make("details", { open: true, className: "call" },
        make("summary", {}, "Call of ", make("code", {}, name)), make("pre", { tabIndex: 0 })));
      box.lastChild.textContent = indented(text);
    }
  }

  #resultForm(onResults) {
    const areas = this.#message.tool_calls.map(({ function: { name } }) =>
      make("textarea", { rows: 2, required: true, "aria-label": `Result of ${name}`, placeholder: `Result of ${name}` }));
    const form = make("form", { className: "editor" }, ...areas,
      make("div", { className: "row end" }, make("button", { className: "primary" }, "Send results")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      onResults(areas.map((area) => area.value));
    });
    return form;
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not whole yet
  }
}
