// Shows a story (story.py) step by step. Text is set as text: a model's tokens are never markup.

const story = JSON.parse(document.getElementById("story").textContent);
const last = story.steps.length - 1;
const get = (id) => document.getElementById(id);
const MOST_BLOCKS = 2048;
let current = 0;
let timer = null;

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style") {
      for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    } else if (name in element) {
      element[name] = value;
    } else {
      element.setAttribute(name, value);
    }
  }
  element.append(...children);
  return element;
}

const hue = (sequence) => ({ "--hue": `${(sequence * 137.5 + 210) % 360}` });
const badge = (sequence) => make("span", { className: "badge", style: hue(sequence) }, `#${sequence}`);
const text = (token) => story.texts[token] ?? `<${token}>`;
const shown = (token) => JSON.stringify(text(token));
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

function percent(probability) {
  return probability === 0 ? "" : `${(100 * probability).toFixed(3)}%`;
}

function spans(numbers) {
  const found = [];
  for (const number of numbers) {
    const end = found.at(-1);
    if (end && end[1] + 1 === number) end[1] = number;
    else found.push([number, number]);
  }
  return found.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ");
}

// What each sequence is at each step, and the blocks and tokens that it has then.
function states() {
  const kinds = story.sequences.map(() => []);
  const held = [];
  let tables = new Map();
  const known = story.sequences.map((seq) => seq.num_prompt_tokens);
  const computed = story.sequences.map(() => 0);
  const cached = story.sequences.map(() => 0);
  story.steps.forEach((step, index) => {
    tables = new Map(tables);
    for (const note of step.waiting) kinds[note.sequence][index] = "waiting";
    for (const note of step.preempted) {
      kinds[note.sequence][index] = "preempted";
      tables.delete(note.sequence);
      computed[note.sequence] = 0;
    }
    for (const row of step.rows) {
      kinds[row.sequence][index] = row.kind;
      tables.set(row.sequence, row.block_table);
      if (row.num_cached_tokens !== null) cached[row.sequence] = row.num_cached_tokens;
      computed[row.sequence] = row.start + row.num_tokens;
      if (row.output.length) known[row.sequence] = row.start + row.num_tokens + row.output.length;
    }
    held.push({ tables, known: [...known], computed: [...computed], cached: [...cached] });
    tables = new Map(tables);
    for (const note of step.ended) tables.delete(note.sequence);
  });
  return { kinds, held };
}

const { kinds, held } = states();
const highest = story.steps.reduce(
  (most, step) => step.rows.reduce((found, row) => Math.max(found, ...row.block_table), most),
  0,
);

function drawTimeline() {
  const body = story.sequences.map((seq) => {
    const cells = story.steps.map((step, index) => {
      const kind = kinds[seq.number][index] ?? "";
      const name = `step ${step.number}, #${seq.number}: ${kind || "not there"}`;
      const button = make("button", { type: "button", title: name, "aria-label": name, tabIndex: -1 });
      button.addEventListener("click", () => go(index));
      return make("td", { className: kind }, button);
    });
    return make("tr", {}, make("th", { scope: "row" }, badge(seq.number)), ...cells);
  });
  get("timeline").replaceChildren(make("tbody", {}, ...body));
}

function drawMeters(step) {
  const tokens = step.rows.reduce((sum, row) => sum + row.num_tokens, 0);
  const meter = (value, max, label) =>
    make("span", {}, make("meter", { min: 0, max, value, "aria-label": label }), ` ${label}`);
  const phases = Object.entries(step.seconds);
  const total = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  const times = phases.map(([name, seconds]) => `${name} ${(1000 * seconds).toFixed(2)}`).join(", ");
  get("meters").replaceChildren(
    meter(tokens, step.budget, `${tokens} of ${step.budget} tokens`),
    meter(step.num_used_blocks, story.num_blocks, `${step.num_used_blocks} of ${story.num_blocks} blocks`),
    make("span", {}, `${(1000 * total).toFixed(2)} ms (${times})`),
  );
}

function drawNotes(step) {
  const items = [
    [step.preempted, "is preempted"],
    [step.waiting, "has no row"],
    [step.ended, "ends"],
  ].flatMap(([notes, what]) =>
    notes.map((note) => make("li", {}, badge(note.sequence), ` ${what}: ${note.text}`)),
  );
  get("notes").replaceChildren(...items);
}

function drawTexts(step, state) {
  const rows = new Map(step.rows.map((row) => [row.sequence, row]));
  const lines = story.sequences
    .filter((seq) => kinds[seq.number][current])
    .map((seq) => {
      const row = rows.get(seq.number);
      const end = row ? row.start + row.num_tokens : 0;
      const tokens = seq.token_ids.slice(0, state.known[seq.number]).map((token, at) => {
        const isNow = row && at >= row.start && at < end;
        const isOutput = row && row.output.length > 0 && at >= end;
        const classes = [
          "token",
          at < state.cached[seq.number] && "cached",
          isNow && "now",
          isOutput && "output",
          !isOutput && at >= state.computed[seq.number] && "missing",
        ].filter(Boolean);
        return make("span", { className: classes.join(" "), title: `token ${token} at ${at}` }, text(token));
      });
      return make("p", {}, badge(seq.number), " ", ...tokens);
    });
  get("texts").replaceChildren(
    make("p", { className: "legend" }, "Marked: computed in this step. Bold: what it gave. Underlined: cached. Pale: not computed yet."),
    ...lines,
  );
}

function drawSample(sample) {
  const how = sample.uniform === null ? "the likeliest" : `drawn with ${sample.uniform.toFixed(4)}`;
  const head = make("h3", {}, `${shown(sample.token_id)} at ${sample.position}, ${how}`);
  if (!sample.counts) {
    head.append(make("span", { className: "rejected" }, ", does not count: the draft before it was wrong"));
  } else if (sample.draft_id !== null) {
    const right = sample.draft_id === sample.token_id ? "accepted" : "rejected";
    head.append(make("span", { className: right }, `, draft ${shown(sample.draft_id)} ${right}`));
  }
  const names = sample.stages.map((stage) =>
    make("th", { scope: "col" }, stage.name, make("small", {}, `${stage.num_left} left`)),
  );
  const rows = sample.candidates.map((token, index) => {
    const cells = sample.stages.map((stage) => {
      const value = stage.probabilities[index];
      return make("td", { className: "share", style: { "--share": `${100 * value}%` } }, percent(value));
    });
    const chosen = token === sample.token_id ? "chosen" : "";
    const name = make("th", { scope: "row", className: "mono", title: `token ${token}` }, shown(token));
    return make("tr", { className: chosen }, name, ...cells);
  });
  const headRow = make("tr", {}, make("th", { scope: "col" }, "token"), ...names);
  const table = make("table", { className: "stages" }, make("thead", {}, headRow), make("tbody", {}, ...rows));
  return make("div", {}, head, make("div", { className: "scroll" }, table));
}

function drawRows(step) {
  const cards = step.rows.map((row) => {
    const hits = row.num_cached_tokens ? `; ${row.num_cached_tokens} tokens were in the prefix cache` : "";
    const added = row.new_blocks.length ? ` (new: ${spans(row.new_blocks)})` : "";
    return make(
      "article",
      { className: "card" },
      make("h3", {}, badge(row.sequence), ` ${row.kind}: ${count(row.num_tokens, "token")} from position ${row.start}`),
      make("p", {}, `${row.why}${hits}`),
      make("p", { className: "quiet" }, `table row ${row.table_idx}; block table ${row.block_table.join(" ")}${added}; slots ${spans(row.slots)}`),
      ...row.samples.map(drawSample),
    );
  });
  get("rows").replaceChildren(...cards);
}

function drawPool(step, state) {
  const owners = new Map();
  for (const [sequence, table] of state.tables) {
    for (const block of table) owners.set(block, [...(owners.get(block) ?? []), sequence]);
  }
  const added = new Set(step.rows.flatMap((row) => row.new_blocks));
  const hits = new Set(
    step.rows.flatMap((row) => row.block_table.slice(0, (row.num_cached_tokens ?? 0) / story.block_size)),
  );
  const number = Math.min(story.num_blocks, MOST_BLOCKS, highest - (highest % 16) + 16);
  const squares = Array.from({ length: number }, (_, block) => {
    const own = owners.get(block) ?? [];
    const classes = ["block", added.has(block) && "new", hits.has(block) && "hit", own.length > 1 && "shared"];
    const owner = own.length ? `of ${own.map((each) => `#${each}`).join(", ")}` : "free or cached";
    const style = own.length ? { ...hue(own[0]), "--filled": "0.35" } : {};
    return make("span", { className: classes.filter(Boolean).join(" "), title: `block ${block}: ${owner}`, style }, `${block}`);
  });
  if (number < story.num_blocks) squares.push(make("span", { className: "quiet" }, `and ${story.num_blocks - number} more`));
  get("pool").replaceChildren(...squares);
}

function go(index) {
  current = Math.max(0, Math.min(last, index));
  const step = story.steps[current];
  get("slider").value = current;
  get("label").textContent = `step ${step.number}, ${current + 1} of ${last + 1}`;
  get("previous").disabled = current === 0;
  get("next").disabled = current === last;
  for (const row of get("timeline").rows) {
    [...row.querySelectorAll("td")].forEach((cell, at) => cell.classList.toggle("current", at === current));
  }
  showColumn();
  drawMeters(step);
  drawNotes(step);
  drawTexts(step, held[current]);
  drawRows(step);
  drawPool(step, held[current]);
  history.replaceState(null, "", `#${current}`);
}

// Scrolls the timeline alone: the page stays where its reader is.
function showColumn() {
  const box = get("timeline").parentElement;
  const cell = get("timeline").querySelector("td.current");
  if (cell === null) return;
  const left = cell.offsetLeft - box.clientWidth / 2;
  if (cell.offsetLeft < box.scrollLeft + 60 || cell.offsetLeft + 40 > box.scrollLeft + box.clientWidth) {
    box.scrollLeft = left;
  }
}

function stop() {
  clearInterval(timer);
  timer = null;
  get("play").setAttribute("aria-pressed", "false");
  get("play").textContent = "Play";
}

function play() {
  if (timer !== null) return stop();
  if (current === last) go(0);
  get("play").setAttribute("aria-pressed", "true");
  get("play").textContent = "Pause";
  timer = setInterval(() => (current === last ? stop() : go(current + 1)), 700);
}

function obey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target === get("slider")) return;
  const isButton = event.target instanceof HTMLButtonElement || event.target.tagName === "SUMMARY";
  const moves = {
    ArrowLeft: () => go(current - 1),
    ArrowRight: () => go(current + 1),
    Home: () => go(0),
    End: () => go(last),
    ...(isButton ? {} : { " ": play }),
  };
  if (event.key in moves) {
    event.preventDefault();
    moves[event.key]();
  }
}

get("model").textContent = story.model;
document.title = `${story.model} – nanovllm explain`;
get("facts").append(
  ...Object.entries(story.facts).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]),
);
if (last >= 0) {
  get("slider").max = last;
  get("slider").addEventListener("input", (event) => go(Number(event.target.value)));
  get("previous").addEventListener("click", () => go(current - 1));
  get("next").addEventListener("click", () => go(current + 1));
  get("play").addEventListener("click", play);
  document.addEventListener("keydown", obey);
  drawTimeline();
  go(Number.parseInt(location.hash.slice(1), 10) || 0);
}
