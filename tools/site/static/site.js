// Draws diagrams in the colours of the page, and lets the keyboard scroll what is too wide.

const here = document.currentScript.src;

const isDark = () =>
  document.body.dataset.theme === "dark" ||
  (document.body.dataset.theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);

async function draw() {
  const dark = isDark();
  mermaid.initialize({
    startOnLoad: false,
    theme: dark ? "dark" : "default",
    themeVariables: { edgeLabelBackground: dark ? "#131416" : "#ffffff" },
  });
  for (const [number, block] of document.querySelectorAll(".diagram").entries()) {
    block.dataset.text ??= block.textContent;
    const { svg } = await mermaid.render(`diagram-${number}`, block.dataset.text);
    block.innerHTML = svg;
    const heading = block.closest("section").querySelector("h1, h2, h3").firstChild.textContent;
    const drawing = block.firstElementChild;
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", `Diagram: ${heading}`);
    drawing.style.minWidth = `min(${drawing.style.maxWidth}, 64rem)`; // smaller text cannot be read
  }
  makeScrollable();
}

function makeScrollable() {
  for (const box of document.querySelectorAll("article :is(.table-wrapper, pre, .scrolls)")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

function describe() { // what the theme leaves unsaid to those who listen
  for (const caption of document.querySelectorAll('.caption[role="heading"]')) caption.ariaLevel = 2;
  document.querySelector("aside.sidebar-drawer").ariaLabel = "All pages";
  document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "On this page");
  for (const corner of document.querySelectorAll("th")) {
    if (!corner.textContent.trim()) corner.replaceWith(document.createElement("td"));
  }
}

const EMPTY = /\b(an?|can|do|does|how|i|is|it|my|not|of|the|to|what|why|you)\b/gi;
const score = (section) => section.weighted_locations.reduce((sum, each) => sum + each.balanced_score, 0);
const byScore = (one, other) => score(other) - score(one);

async function search() { // a question's words, by page and section
  const words = new URLSearchParams(location.search).get("q") ?? "";
  document.querySelector("#query").value = words;
  if (!words) return;
  const pagefind = await import(new URL("../pagefind/pagefind.js", here));
  const { results } = await pagefind.search(words.replaceAll(EMPTY, " "));
  document.querySelector("#found").textContent = `${results.length} pages`;
  for (const result of results.slice(0, 20)) {
    const page = await result.data();
    const item = document.createElement("li");
    for (const { url, title, excerpt } of [page, ...page.sub_results.sort(byScore).slice(0, 3)]) {
      if (item.children.length && url === page.url) continue; // the page's own beginning
      const link = document.createElement("a");
      link.href = url;
      link.textContent = title ?? page.meta.title;
      const text = document.createElement("p");
      text.innerHTML = excerpt; // Pagefind escapes it and marks the words
      item.append(link, text);
    }
    document.querySelector("#results").append(item);
  }
}

addEventListener("DOMContentLoaded", () => {
  describe();
  if (document.querySelector("#query")) search();
  for (const image of document.querySelectorAll('article p > img[src$=".svg"]')) {
    image.parentElement.classList.add("scrolls");
  }
  makeScrollable();
  addEventListener("resize", makeScrollable);
  if (!document.querySelector(".diagram")) return;
  const library = document.createElement("script");
  library.src = new URL("mermaid.js", here);
  library.addEventListener("load", () => {
    let drawn = isDark();
    const redraw = () => {
      if (drawn === isDark()) return;
      drawn = isDark();
      draw();
    };
    draw();
    new MutationObserver(redraw).observe(document.body, { attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  });
  document.head.append(library);
});
