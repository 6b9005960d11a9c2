// The page at /status: the load of the server, each second.
import { request } from "./api.js";
import { byId, make } from "./dom.js";

let last = null; // the status before

const digits = (value, most = 0) => value.toLocaleString("en", { maximumFractionDigits: most });
const rate = (value) => digits(value, value < 10 ? 1 : 0);
const percent = (value) => `${digits(100 * value, 1)}%`;
const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
const perSecond = (s, count) => last && (count(s) - count(last)) / (s.uptime - last.uptime);
const meanSince = (now, before) => (now.seconds - before.seconds) / (now.count - before.count);

// Each tile: name, number of a status, how it is written. What is no number leaves the tile as it is.
const TILES = [
  ["Output tokens/s", (s) => perSecond(s, (s) => s.output_tokens), rate],
  ["Prompt tokens/s", (s) => perSecond(s, (s) => s.prompt_tokens), rate],
  ["Requests ended/s", (s) => perSecond(s, (s) => sum(s.requests)), rate],
  ["Running", (s) => s.running, digits],
  ["Waiting", (s) => s.waiting, digits],
  ["KV cache used", (s) => s.kv_cache_usage, percent],
  ["Prefix cache hits", (s) => s.prefix_cache_hits / s.prefix_cache_queries, percent],
  ["Time to first token", (s) => last && meanSince(s.first_tokens, last.first_tokens), (v) => `${digits(1000 * v)} ms`],
  ["Acceptance length", (s) => s.mean_acceptance_length, (v) => digits(v, 2)],
  ["Refused", (s) => sum(s.refused), digits],
];
const tiles = TILES.map(([name, number, write]) => {
  const value = make("dd", {}, "–");
  byId("tiles").append(make("div", {}, make("dt", {}, name), value));
  return (status) => {
    const found = number(status);
    if (Number.isFinite(found)) value.textContent = write(found);
  };
});

async function poll() {
  if (!document.hidden) {
    try {
      show(await (await request("status.json")).json());
      byId("state").textContent = "";
    } catch (error) {
      byId("state").textContent = error.message;
      if (error.name === "NoKey") return;
    }
  }
  setTimeout(poll, 1000);
}

function show(status) {
  byId("model").textContent = document.title = status.model;
  byId("about").textContent = `nanovllm ${status.version}, up ${digits(status.uptime / 60)} min, ` +
    `context ${digits(status.max_model_len)} tokens, KV cache ${digits(status.kv_cache_tokens)} tokens`;
  if (last && status.uptime <= last.uptime) last = null; // the server was started again
  for (const update of tiles) update(status);
  last = status;
}

poll();
