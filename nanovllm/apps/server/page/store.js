// The conversations that this browser keeps, in IndexedDB; and their form in files.
//
// A conversation: {id, title, created, updated, settings, messages}, times in milliseconds. A message is
// one of OpenAI's format; an answer has beside `content` and `tool_calls`: `reasoning`, `model`,
// `finish_reason`, `error`, and `stats` {prompt, output, first, rate}, in tokens, ms and tokens/s.
import { createStore, del, get, set, values } from "./vendor/idb-keyval.js";

const FORMAT = "nanovllm-conversations";
const DEFAULTS = "nanovllm-settings";
const ROLES = ["user", "assistant", "tool"];
const database = createStore("nanovllm", "conversations");
const others = new BroadcastChannel("nanovllm"); // the same page in other tabs

export const conversations = new Map(); // by id

/** Read all; call `changed(id)` when another tab changes one that is not `isBusy(id)` here. */
export async function open(isBusy, changed) {
  for (const each of await values(database)) conversations.set(each.id, each);
  others.onmessage = async ({ data: id }) => {
    const found = await get(id, database);
    if (isBusy(id)) return;
    if (found) conversations.set(id, found);
    else conversations.delete(id);
    changed(id);
  };
}

export function create() {
  const now = Date.now();
  const id = Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");
  return { id, title: "", created: now, updated: now, settings: lastSettings(), messages: [] };
}

/** Save a conversation; other tabs are told unless it is still being written. */
export async function save(conversation, { isWritten = true } = {}) {
  conversations.set(conversation.id, conversation);
  await set(conversation.id, conversation, database);
  if (isWritten) others.postMessage(conversation.id);
}

export async function remove(id) {
  conversations.delete(id);
  await del(id, database);
  others.postMessage(id);
}

/** Return the conversations whose title or messages have the words, the newest first. */
export function find(words) {
  const wanted = words.toLowerCase();
  const has = (each) => [each.title, ...each.messages.map((message) => message.content ?? "")]
    .some((text) => text.toLowerCase().includes(wanted));
  return [...conversations.values()].filter((each) => !wanted || has(each)).sort((a, b) => b.updated - a.updated);
}

// --- settings ---

const lastSettings = () => JSON.parse(localStorage.getItem(DEFAULTS) ?? "{}");
export const keepSettings = (settings) => localStorage.setItem(DEFAULTS, JSON.stringify(settings));

// --- files ---

export const exported = (list) => JSON.stringify({ format: FORMAT, version: 1, conversations: list }, null, 1);

/** Save the conversations of an exported text, and return how many were new. Raises an Error on another text. */
export async function importText(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON. Choose one that was exported here.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error(`This file has no conversations: its "format" is not "${FORMAT}".`);
  }
  const found = file.conversations.map(checked);
  const fresh = found.filter((each) => conversations.get(each.id)?.updated !== each.updated);
  for (const each of fresh) {
    await save(conversations.has(each.id) ? { ...each, id: create().id } : each);
  }
  return fresh.length;
}

function checked(given, index) {
  const fail = (what) => { throw new Error(`Conversation ${index + 1} of this file ${what}. Nothing was imported.`); };
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
  if (!isObject(given) || typeof given.id !== "string" || !Array.isArray(given.messages)) fail("has no id or messages");
  for (const message of given.messages) {
    if (!isObject(message) || !ROLES.includes(message.role)) fail(`has a message whose role is not ${ROLES.join(", ")}`);
    if (typeof message.content !== "string") fail("has a message whose content is not text");
    const isPicture = (each) => typeof each === "string" && /^data[:]image\//.test(each);
    if (!(message.pictures ?? []).every(isPicture)) fail("has a message whose pictures are not data: addresses");
    const calls = message.tool_calls ?? [];
    const isCall = (call) => typeof call?.id === "string" && typeof call.function?.name === "string" &&
      typeof call.function.arguments === "string";
    if (!Array.isArray(calls) || !calls.every(isCall)) fail("has tool calls of another form than OpenAI's");
  }
  const time = (value) => (Number.isFinite(value) ? value : Date.now());
  return {
    id: given.id, title: String(given.title ?? ""), created: time(given.created), updated: time(given.updated),
    settings: isObject(given.settings) ? given.settings : {}, messages: given.messages,
  };
}
