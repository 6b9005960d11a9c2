// One answer of the model: the request that asks for it, and the stream that brings it.
import { events, request } from "./api.js";

const SAMPLING = ["temperature", "top_p", "max_tokens", "seed"];

/**
 * Return the body of a request that answers the messages; `sampling` counts where the settings say nothing.
 */
export function requestBody({ settings, messages }, model, sampling = {}) {
  const sent = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const { role, content: text, tool_calls, tool_call_id, pictures } of messages) {
    const shown = (pictures ?? []).map((url) => ({ type: "image_url", image_url: { url } }));
    const content = shown.length ? [...shown, { type: "text", text }] : text;
    const last = sent.at(-1);
    if (role === "assistant" && !content && !tool_calls) continue; // failed, or was stopped before it began
    if (role === "user" && last?.role === "user") last.content = joined(last.content, content); // templates want turns
    else sent.push({ role, content, tool_calls, tool_call_id });
  }
  const body = { ...sampling, model, messages: sent, stream: true };
  body.stream_options = { include_usage: true, continuous_usage_stats: true };
  for (const name of SAMPLING) if (settings[name] != null) body[name] = settings[name];
  if (settings.tools) {
    body.tools = settings.tools;
    body.tool_choice = settings.tool_choice;
  }
  return body;
}

const partsOf = (content) => (typeof content === "string" ? [{ type: "text", text: content }] : content);

const joined = (first, second) => (typeof first === "string" && typeof second === "string" ?
  `${first}\n\n${second}` : [...partsOf(first), ...partsOf(second)]);

/**
 * Write the answer to `conversation` into `message`, as it comes; `changed` is called after each event.
 * What goes wrong is in `message.error`.
 */
export async function answer(conversation, message, model, signal, changed) {
  const start = performance.now();
  const clock = { first: null, numFirst: 0 };
  Object.assign(message, { model, content: "", reasoning: "", stats: null });
  try {
    const body = requestBody(conversation, model, await chatSampling(model, signal));
    const reply = await request("v1/chat/completions", { body, signal });
    for await (const event of events(reply)) {
      add(message, event);
      if (event.usage) message.stats = measured(event.usage, start, clock);
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") message.finish_reason = "stopped";
    else message.error = error.message;
  }
}

/** Return what a chat samples with where the model recommends nothing; only its engine knows that. */
async function chatSampling(model, signal) {
  const card = async () => (await (await request(`v1/models/${encodeURIComponent(model)}`, { signal })).json()).chat_sampling;
  const found = await card();
  if (found) return found;
  await request("tokenize", { body: { model, prompt: "" }, signal }); // which loads it
  return (await card()) ?? {};
}

function add(message, { choices }) {
  const choice = choices[0];
  if (!choice) return;
  const { content, reasoning, tool_calls: calls } = choice.delta;
  message.content += content ?? "";
  message.reasoning += reasoning ?? "";
  for (const { index, id, function: { name, arguments: piece } } of calls ?? []) {
    message.tool_calls ??= [];
    message.tool_calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
    message.tool_calls[index].function.arguments += piece;
  }
  if (choice.finish_reason) message.finish_reason = choice.finish_reason;
}

/** Return the counts and times so far; the rate is that of the tokens after the first event with some. */
function measured(usage, start, clock) {
  const now = performance.now();
  if (clock.first === null && usage.completion_tokens) Object.assign(clock, { first: now, numFirst: usage.completion_tokens });
  const rate = (1000 * (usage.completion_tokens - clock.numFirst)) / (now - clock.first);
  return {
    prompt: usage.prompt_tokens, output: usage.completion_tokens, rate: Number.isFinite(rate) ? rate : null,
    first: clock.first === null ? null : clock.first - start,
  };
}
