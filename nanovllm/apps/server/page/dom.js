// Makes elements: text is text and never HTML. Icons, notices, and files for the user.

export const byId = (id) => document.getElementById(id);

/** Return a new element; `properties` are those of the element, `data-` and `aria-` names attributes. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export const iconButton = (icon, label, onclick) =>
  make("button", { type: "button", className: "icon", "data-icon": icon, "aria-label": label, title: label, onclick });

/** Show a notice for a while; with `undo`, a button that calls it. */
export function toast(text, undo) {
  const close = () => byId("toast").replaceChildren();
  const button = undo && make("button", { type: "button", onclick: () => { close(); undo(); } }, "Undo");
  const notice = make("div", {}, make("span", {}, text), button ?? "");
  byId("toast").replaceChildren(notice);
  setTimeout(() => notice.remove(), undo ? 8000 : 4000);
}

/** Put text in the clipboard, also where the browser gives no access to it: a page without TLS. */
export async function copy(text) {
  if (await navigator.clipboard?.writeText(text).then(() => true, () => false)) return;
  const area = make("textarea", { value: text, className: "sr" });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
