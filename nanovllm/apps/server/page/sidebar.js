// The list of conversations: search, rename, delete, export and import.
import { byId, download, iconButton, make, toast } from "./dom.js";
import * as store from "./store.js";

const DAY = 24 * 60 * 60 * 1000;
let state; // {currentId(), isRunning(id), removed(id), renamed()}

export function start(callbacks) {
  state = callbacks;
  byId("search").addEventListener("input", show);
  byId("export").addEventListener("click", () => exportFile([...store.conversations.values()], "conversations"));
  byId("import").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", importFile);
  byId("open-sidebar").addEventListener("click", () => setOpen(true));
  byId("close-sidebar").addEventListener("click", () => setOpen(false));
  byId("scrim").addEventListener("click", () => setOpen(false));
}

/** Open or close the list where it covers the page: on narrow screens. */
export function setOpen(isOpen) {
  const covers = isOpen && matchMedia("(max-width: 48rem)").matches;
  document.body.classList.toggle("sidebar-open", covers);
  byId("scrim").hidden = !covers;
  if (isOpen) byId("close-sidebar").focus();
  else if (byId("sidebar").contains(document.activeElement)) byId("prompt").focus();
}

/** Show the list as it is now. */
export function show() {
  const words = byId("search").value.trim();
  const today = new Date().setHours(0, 0, 0, 0);
  const parts = { "Today": [], "Last 7 days": [], "Earlier": [] };
  for (const each of store.find(words)) {
    const part = each.updated >= today ? "Today" : each.updated >= today - 6 * DAY ? "Last 7 days" : "Earlier";
    parts[part].push(item(each));
  }
  const shown = Object.entries(parts).filter(([, items]) => items.length);
  const nothing = make("p", { className: "note" }, words ? `Nothing has “${words}”.` : "Conversations stay in this browser.");
  byId("list").replaceChildren(...(shown.length ? shown.flatMap(([name, items]) => [make("h2", {}, name), make("ul", {}, ...items)]) : [nothing]));
}

function item(conversation) {
  const { id, title } = conversation;
  const link = make("a", { href: `#${id}`, title }, title || "New conversation");
  link.addEventListener("click", () => setOpen(false));
  link.addEventListener("dblclick", () => rename(conversation, entry));
  if (id === state.currentId()) link.setAttribute("aria-current", "page");
  const entry = make("li", { className: state.isRunning(id) ? "running" : "" }, link, make("span", { className: "row" },
    iconButton("edit", "Rename", () => rename(conversation, entry)),
    iconButton("download", "Export", () => exportFile([conversation], title || "conversation")),
    iconButton("delete", "Delete", () => remove(conversation))));
  return entry;
}

function rename(conversation, entry) {
  const input = make("input", { value: conversation.title, maxLength: 200, "aria-label": "Title" });
  entry.replaceChildren(input);
  input.select();
  const end = async (isKept) => {
    input.onblur = null;
    if (isKept && input.value.trim()) {
      conversation.title = input.value.trim();
      await store.save(conversation);
    }
    state.renamed();
    show();
  };
  input.onblur = () => end(true);
  input.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter" && !event.isComposing) end(true);
    if (event.key === "Escape") end(false);
  });
}

async function remove(conversation) {
  state.removed(conversation.id);
  await store.remove(conversation.id);
  show();
  toast("The conversation is deleted.", async () => {
    await store.save(conversation);
    show();
  });
}

function exportFile(list, name) {
  if (!list.length) toast("There is nothing to export yet.");
  else download(`${name.replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(0, 60)}.json`, store.exported(list));
}

async function importFile({ target }) {
  const [file] = target.files;
  target.value = "";
  if (!file) return;
  try {
    const count = await store.importText(await file.text());
    toast(count === 1 ? "One conversation was imported." : `${count} conversations were imported.`);
  } catch (error) {
    toast(error.message);
  }
  show();
}
