// Dark or light: the system's choice, unless the button has made another. Runs before the page shows.
"use strict";
{
  const STORED = "nanovllm-theme";
  const root = document.documentElement;
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  const show = (theme) => { root.dataset.theme = theme ?? "system"; };
  show(localStorage.getItem(STORED));
  addEventListener("storage", (event) => { if (event.key === STORED) show(event.newValue); });
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const now = root.dataset.theme === "system" ? (isDark.matches ? "dark" : "light") : root.dataset.theme;
      const next = now === "dark" ? "light" : "dark";
      if (next === (isDark.matches ? "dark" : "light")) localStorage.removeItem(STORED);
      else localStorage.setItem(STORED, next);
      show(localStorage.getItem(STORED));
    });
  });
}
