// The page at /: the open conversation, its answers that are being written, and the keyboard.
import { request } from "./api.js";
import { byId, make, toast } from "./dom.js";
import { AnswerView, editor, resultView, userView } from "./messages.js";
import * as pictures from "./pictures.js";
import * as settings from "./settings.js";
import * as sidebar from "./sidebar.js";
import * as store from "./store.js";
import { answer } from "./turn.js";

const IDEAS = [
  "What is a KV cache, and why does it make decoding fast?",
  "Write a Python function that merges two sorted lists.",
  "Explain paged attention to a child.",
];
const MOST_SHOWN = 60; // messages of a conversation that are shown at first
const SAVED_EACH = 2000; // milliseconds, while an answer is being written
const AT_END = 60; // pixels from the end within which the page follows the text

const scroll = byId("scroll"), messages = byId("messages"), prompt = byId("prompt");
const running = new Map(); // by the conversation's id: {controller, message}
const model = byId("model"), cannotChat = new Set(), cannotSee = new Set();
let current = store.create();
let live = null; // the view of the answer that grows on the page

// --- the conversation ---

function show({ all = false } = {}) {
  live = null;
  const list = current.messages, first = all ? 0 : Math.max(0, list.length - MOST_SHOWN);
  const earlier = first ? [make("button", { type: "button", className: "earlier", onclick: () => show({ all: true }) },
    `Show ${first} earlier messages`)] : [];
  messages.replaceChildren(...earlier, ...list.slice(first).map((message, index) => viewOf(message, first + index)));
  byId("welcome").hidden = list.length > 0;
  showTitle();
  showState();
  if (!all) toEnd();
}

function viewOf(message, index) {
  if (message.role === "tool") return resultView(message);
  if (message.role === "user") {
    const view = userView(message, () => edit(view, index));
    return view;
  }
  const view = new AnswerView(message);
  if (running.get(current.id)?.message === message) {
    live = view;
    view.update();
  } else {
    view.finish(index === current.messages.length - 1 ? actionsOf(current, index) : null);
  }
  return view.element;
}

const actionsOf = (conversation, index) => ({
  again: () => answerFrom(conversation, index),
  results: (texts) => {
    const calls = conversation.messages[index].tool_calls;
    conversation.messages.push(...texts.map((content, i) => ({ role: "tool", tool_call_id: calls[i].id, content })));
    answerFrom(conversation, conversation.messages.length);
  },
});

function edit(view, index) {
  const conversation = current;
  if (running.has(conversation.id)) return;
  const form = editor(conversation.messages[index].content, (text) => {
    const before = structuredClone(conversation.messages);
    conversation.messages.splice(index, Infinity, { ...before[index], content: text });
    answerFrom(conversation, index + 1);
    if (before.length > index + 2) {
      toast("The messages after it are gone.", async () => {
        running.get(conversation.id)?.controller.abort();
        await running.get(conversation.id)?.ended;
        conversation.messages = before;
        await store.save(conversation);
        if (current === conversation) show();
      });
    }
  }, () => { form.replaceWith(view); prompt.focus(); });
  view.replaceWith(form);
  const [area] = form.elements;
  area.focus();
  area.setSelectionRange(area.value.length, area.value.length);
}

function send() {
  const text = prompt.value.trim();
  if (!text || running.has(current.id)) return;
  prompt.value = "";
  current.title ||= text.replace(/\s+/g, " ").slice(0, 80);
  const found = pictures.take();
  current.messages.push({ role: "user", content: text, ...(found.length ? { pictures: found } : {}) });
  answerFrom(current, current.messages.length);
}

// --- answers ---

/** Let the model answer the messages before `index`; those from there on go. */
function answerFrom(conversation, index) {
  if (running.has(conversation.id)) return;
  const message = { role: "assistant", content: "" };
  const turn = { controller: new AbortController(), message };
  running.set(conversation.id, turn);
  const asked = { ...conversation, messages: conversation.messages.slice(0, index) };
  conversation.messages = [...asked.messages, message];
  conversation.updated = Date.now();
  if (model.value) conversation.settings.model = model.value;
  if (current === conversation) {
    history.replaceState(null, "", `#${conversation.id}`);
    show();
  }
  keep(conversation);
  turn.ended = write(conversation, asked, turn);
}

async function write(conversation, asked, { controller, message }) {
  let saved = performance.now();
  const changed = () => {
    if (current.id === conversation.id) draw();
    if (performance.now() - saved < SAVED_EACH || !store.conversations.has(conversation.id)) return;
    saved = performance.now();
    store.save(conversation, { isWritten: false }).catch(() => {}); // the last save tells
  };
  await loadModels().catch(() => {});
  const name = conversation.settings.model ?? model.value;
  await answer(asked, message, name, controller.signal, changed);
  running.delete(conversation.id);
  conversation.updated = Date.now();
  if (current.id === conversation.id) finish();
  if (store.conversations.has(conversation.id)) await keep(conversation); // else it was deleted
  sidebar.show();
}

function finish() {
  const wasAtEnd = isAtEnd();
  live.finish(actionsOf(current, current.messages.length - 1));
  live = null;
  byId("announce").textContent = current.messages.at(-1).error ? "" : "The answer is finished.";
  showState();
  if (wasAtEnd) toEnd();
}

let isDrawn = true, notBefore = 0;

/** Show what is new at the next frame; after a slow one, leave the browser three times as long to itself. */
function draw() {
  if (!isDrawn) return;
  isDrawn = false;
  setTimeout(() => requestAnimationFrame(() => {
    isDrawn = true;
    if (live === null) return;
    const start = performance.now(), wasAtEnd = isAtEnd();
    live.update();
    if (wasAtEnd) toEnd();
    notBefore = performance.now() + 3 * (performance.now() - start);
  }), Math.max(0, notBefore - performance.now()));
}

const stop = () => running.get(current.id)?.controller.abort();

async function keep(conversation) {
  try {
    await store.save(conversation);
  } catch (error) {
    toast(`This browser did not keep the conversation: ${error.message}`);
  }
  sidebar.show();
}

// --- what is around it ---

const isAtEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < AT_END;
const toEnd = () => { scroll.scrollTop = scroll.scrollHeight; };

/** Let the user type at once, unless that brings up a keyboard on the screen. */
const focusPrompt = () => { if (matchMedia("(hover: hover)").matches) prompt.focus(); };

function showTitle() {
  byId("title").textContent = current.title || "New conversation";
  document.title = current.title ? `${current.title} – nanovllm` : "nanovllm";
}

function showState() {
  const isRunning = running.has(current.id);
  byId("stop").hidden = !isRunning;
  byId("send").hidden = isRunning;
  byId("send").disabled = !prompt.value.trim();
  byId("to-end").hidden = isAtEnd();
}

const named = () => location.hash.slice(1);

/** Open the conversation that the address names, or a new one. */
function openNamed() {
  const found = store.conversations.get(named());
  current = found ?? store.create();
  chooseModel();
  show();
  sidebar.show();
}

function begin() {
  history.replaceState(null, "", location.pathname);
  sidebar.setOpen(false);
  openNamed();
  focusPrompt();
}

/** Fill the list of models, once. */
async function loadModels() {
  if (model.options.length) return;
  const { data } = await (await request("v1/models")).json();
  data.filter(({ chats }) => chats === false).forEach(({ id }) => cannotChat.add(id));
  data.filter(({ reads_pictures: sees }) => sees === false).forEach(({ id }) => cannotSee.add(id));
  if (!model.options.length) model.append(...data.map(({ id }) => make("option", { value: id }, id)));
  chooseModel();
}

function chooseModel() {
  const names = Array.from(model.options, (option) => option.value);
  const first = names.find((name) => !cannotChat.has(name)) ?? names[0];
  if (names.length) model.value = names.includes(current.settings.model) ? current.settings.model : first;
  showEyes();
}

const showEyes = () => { byId("picture").hidden = cannotSee.has(model.value); };

function changeSettings() {
  settings.edit(current.settings, (changed) => {
    current.settings = changed;
    store.keepSettings(changed);
    if (current.messages.length) keep(current);
  });
}

const KEYS = { // with Ctrl, or the command key of a Mac
  "k": () => { sidebar.setOpen(true); byId("search").focus(); },
  ",": changeSettings,
  "shift o": begin,
  "shift enter": answerAgain,
};

function answerAgain() {
  if (current.messages.at(-1)?.role === "assistant") answerFrom(current, current.messages.length - 1);
}

function onKey(event) {
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  const hasControl = (event.ctrlKey || event.metaKey) && !event.altKey;
  const action = hasControl && KEYS[(event.shiftKey ? "shift " : "") + event.key.toLowerCase()];
  if (action) {
    event.preventDefault();
    action();
  } else if (event.key === "Escape") {
    if (document.body.classList.contains("sidebar-open")) sidebar.setOpen(false);
    else stop();
  }
}

function onPromptKey(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !prompt.value) {
    const index = current.messages.findLastIndex((message) => message.role === "user");
    const view = [...messages.querySelectorAll("article.user")].at(-1);
    if (view && index >= 0) {
      event.preventDefault();
      edit(view, index);
    }
  }
}

async function start() {
  document.addEventListener("keydown", onKey);
  prompt.addEventListener("keydown", onPromptKey);
  prompt.addEventListener("input", showState);
  scroll.addEventListener("scroll", () => { byId("to-end").hidden = isAtEnd(); });
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("stop").addEventListener("click", stop);
  byId("to-end").addEventListener("click", toEnd);
  byId("new").addEventListener("click", begin);
  byId("settings").addEventListener("click", changeSettings);
  byId("shortcuts").addEventListener("click", () => byId("shortcuts-dialog").showModal());
  for (const button of document.querySelectorAll("[data-close]")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
  for (const button of document.querySelectorAll(".icon[aria-label]")) button.title ||= button.ariaLabel;
  pictures.start(() => cannotSee.has(model.value));
  model.addEventListener("change", () => {
    showEyes();
    current.settings.model = model.value;
    store.keepSettings(current.settings);
    if (current.messages.length) keep(current);
  });
  byId("ideas").append(...IDEAS.map((idea) => make("button", { type: "button", onclick: () => { prompt.value = idea; send(); } }, idea)));
  addEventListener("hashchange", () => { // other names are places on the page
    if (["", current.id].includes(named()) || store.conversations.has(named())) openNamed();
  });
  sidebar.start({
    currentId: () => current.id,
    isRunning: (id) => running.has(id),
    removed: (id) => { running.get(id)?.controller.abort(); if (id === current.id) begin(); },
    renamed: showTitle,
  });
  try {
    await store.open((id) => running.has(id), (id) => { if (id === current.id) openNamed(); else sidebar.show(); });
  } catch (error) {
    toast(`This browser keeps no conversations here: ${error.message}`);
  }
  openNamed();
  focusPrompt();
  await loadModels().catch((error) => toast(error.message));
}

start();
