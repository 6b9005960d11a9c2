// Draws the diagrams in the page's colours, and lets the keyboard scroll what is too wide.

const here = document.currentScript.src;

const isDark = () =>
  document.body.dataset.theme === "dark" ||
  (document.body.dataset.theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);

async function draw() {
  mermaid.initialize({ startOnLoad: false, theme: isDark() ? "dark" : "default", htmlLabels: true });
  for (const [number, block] of document.querySelectorAll(".diagram").entries()) {
    block.dataset.text ??= block.textContent;
    const { svg } = await mermaid.render(`diagram-${number}`, block.dataset.text);
    block.innerHTML = svg;
    block.firstElementChild.setAttribute("role", "img");
    const heading = block.closest("section").querySelector("h1, h2, h3").firstChild.textContent;
    block.firstElementChild.setAttribute("aria-label", `Diagram: ${heading}`);
  }
  makeScrollable();
}

function makeScrollable() {
  for (const box of document.querySelectorAll("article .table-wrapper, article pre, article .scrolls, .diagram")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

addEventListener("DOMContentLoaded", () => {
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
