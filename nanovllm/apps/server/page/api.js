// Requests to the server: with the API key that the user types, and errors in words.
import { make } from "./dom.js";

const KEY = "nanovllm-api-key"; // in sessionStorage: until the tab is closed
let asked = null; // the promise of a key that the user is being asked for

/** Fetch a path; `body` is sent as JSON. Asks for an API key if the server wants one. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    if (body) headers["Content-Type"] = "application/json";
    const answer = await reached(fetch(path, {
      method: body ? "POST" : "GET", body: body && JSON.stringify(body), headers, signal, cache: "no-store",
      credentials: "omit",
    }));
    if (answer.ok) return answer;
    if (answer.status === 401) {
      asked ??= askForKey(key !== null).finally(() => { asked = null; });
      await asked;
      continue;
    }
    const error = await answer.json().catch(() => null);
    const wait = answer.headers.get("Retry-After");
    const message = error?.error?.message ?? `the server answered with status ${answer.status}`;
    throw new Error(sentence(message) + (wait ? ` Try again in ${wait} s.` : ""));
  }
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/** Await what may fail for want of a connection. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached, or the connection broke.");
  }
}

function askForKey(isWrong) {
  const input = make("input", { type: "password", autocomplete: "off", required: true, pattern: "\\s*[!-~]+\\s*", title: "A key has no spaces" });
  const form = make("form", {},
    make("h2", {}, "API key"),
    make("p", { className: "note" }, isWrong ? "The server does not take this key. Type another one." :
      "The server wants a key. This tab keeps it until it is closed."),
    make("label", {}, "Key", input),
    make("div", { className: "row end" }, make("button", { className: "primary" }, "Use this key")));
  const dialog = make("dialog", { "aria-label": "API key" }, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve, reject) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, input.value.trim());
      resolve();
      dialog.close();
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      reject(Object.assign(new Error("The server wants an API key: reload the page to type one."), { name: "NoKey" }));
    });
  });
}

/** Yield the events of a stream, each a value of JSON. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reached(reader.read());
    if (done) throw new Error("The connection ended before the answer did.");
    const lines = (buffer + value).split(/\r?\n/);
    buffer = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (!line.startsWith("data:")) continue;
      const event = JSON.parse(line.slice(5));
      if (event.error) throw new Error(sentence(event.error.message));
      yield event;
    }
  }
}
