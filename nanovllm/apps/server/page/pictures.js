// Pictures for the next message: pasted, dropped, or chosen. They stay in this browser until it is sent.
import { byId, iconButton, make, toast } from "./dom.js";

const MOST_BYTES = 11 * 2 ** 20; // of a file: a request with it has four thirds of that
let waiting = []; // data: addresses

/** Return the pictures of a message, to be looked at; with `onRemove`, each has a button. */
export const thumbnails = (urls, onRemove) => make("div", { className: "pictures" }, ...urls.map((url, index) =>
  make("figure", {}, make("img", { src: url, alt: `Picture ${index + 1}` }),
    onRemove ? iconButton("close", `Remove picture ${index + 1}`, () => onRemove(index)) : "")));

/** Return the pictures that wait, which the next message takes. */
export function take() {
  const taken = waiting;
  waiting = [];
  show();
  return taken;
}

function show() {
  byId("waiting").replaceChildren(...(waiting.length ? [thumbnails(waiting, (index) => { waiting.splice(index, 1); show(); })] : []));
}

async function add(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    if (file.size > MOST_BYTES) {
      toast(`${file.name} has more than ${MOST_BYTES >> 20} MiB: make it smaller.`);
      continue;
    }
    waiting.push(await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    }));
  }
  show();
  byId("prompt").focus();
}

/** Let the user add pictures; `isBlind` says whether the model reads none. */
export function start(isBlind) {
  const input = byId("picture-file");
  const tryTo = (files, event) => {
    const pictures = [...files].filter(({ type }) => type.startsWith("image/"));
    if (!pictures.length) return;
    event?.preventDefault();
    if (isBlind()) toast("This model reads text only.");
    else add(pictures).catch((error) => toast(error.message));
  };
  byId("picture").addEventListener("click", () => input.click());
  input.addEventListener("change", () => { tryTo(input.files); input.value = ""; });
  addEventListener("paste", (event) => tryTo(event.clipboardData?.files ?? [], event));
  addEventListener("dragover", (event) => { if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); });
  addEventListener("drop", (event) => tryTo(event.dataTransfer?.files ?? [], event));
}
