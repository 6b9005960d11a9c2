// The dialog with a conversation's settings: system prompt, sampling, tools.
import { byId } from "./dom.js";

const LABELS = { temperature: "Temperature", top_p: "Top p", max_tokens: "Most tokens", seed: "Seed" };
const form = byId("settings-form");

/** Let the user edit settings; `save` gets the new ones. */
export function edit(settings, save) {
  form.reset();
  for (const name of ["system", "tool_choice", ...Object.keys(LABELS)]) {
    if (settings[name] != null) form.elements[name].value = settings[name];
  }
  form.elements.tools.value = settings.tools ? JSON.stringify(settings.tools, null, 2) : "";
  byId("settings-error").textContent = "";
  form.onsubmit = (event) => {
    event.preventDefault();
    try {
      save({ model: settings.model, ...read() });
      byId("settings-dialog").close();
    } catch (error) {
      byId("settings-error").textContent = error.message;
    }
  };
  byId("settings-dialog").showModal();
}

/** Return the form's settings, without those that are empty. Raises an Error that names a wrong one. */
function read() {
  const found = { tool_choice: form.elements.tool_choice.value };
  const system = form.elements.system.value.trim();
  if (system) found.system = system;
  for (const [name, label] of Object.entries(LABELS)) {
    const field = form.elements[name];
    if (!field.validity.valid) throw new Error(`${label}: ${field.validationMessage}`);
    if (field.value) found[name] = field.valueAsNumber;
  }
  const tools = form.elements.tools.value.trim();
  if (tools) found.tools = functions(tools);
  return found;
}

function functions(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: this is not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools) || !tools.every((tool) => tool?.type === "function" && typeof tool.function?.name === "string")) {
    throw new Error('Tools: give a list, each {"type": "function", "function": {"name": …, "parameters": …}}.');
  }
  return tools.length ? tools : undefined;
}
