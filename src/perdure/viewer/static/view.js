// Keyboard shortcuts, and reloading of pages of open runs. All pages work without this script.
"use strict";
(() => {
  const trusted = window.trustedTypes
    ? window.trustedTypes.createPolicy("perdure", { createHTML: (text) => text })
    : { createHTML: (text) => text };
  const rows = () => [...document.querySelectorAll("[data-row]")];
  const typing = (element) => /^(INPUT|SELECT|TEXTAREA)$/.test(element.tagName);

  function move(step) {
    const all = rows();
    if (!all.length) return;
    const now = all.findIndex((row) => row.classList.contains("at"));
    const top = all.findIndex((row) => row.getBoundingClientRect().top > 40);
    const from = now < 0 ? Math.max(0, top) - (step > 0 ? 1 : 0) : now;
    const row = all[Math.min(all.length - 1, Math.max(0, from + step))];
    all.forEach((one) => one.classList.toggle("at", one === row));
    (row.querySelector("a.open") || row).focus({ preventScroll: true });
    row.scrollIntoView({ block: "nearest" });
  }

  function fold() {
    const all = [...document.querySelectorAll("main details")];
    const open = all.some((one) => !one.open);
    all.forEach((one) => { one.open = open; });
  }

  function press(element) {
    if (typing(element)) element.focus();
    else if (element.tagName === "SUMMARY") element.parentElement.open = !element.parentElement.open;
    else element.click();
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") document.activeElement.blur();
    if (typing(event.target)) return;
    const known = [...document.querySelectorAll("[data-key]")].find((one) => one.dataset.key === event.key);
    const page = { n: "next", p: "prev" }[event.key];
    const link = page && document.querySelector(`a[rel="${page}"]`);
    if (event.key === "j") move(1);
    else if (event.key === "k") move(-1);
    else if (event.key === "e") fold();
    else if (event.key === "Enter" && event.target.dataset.row !== undefined) {
      const open = event.target.querySelector("a");
      if (open) open.click();
    } else if (known) press(known);
    else if (link) link.click();
    else return;
    if (event.key !== "Enter") event.preventDefault();
  });

  // A reload keeps opened sections and the selected row.
  const at = () => rows().findIndex((row) => row.classList.contains("at"));
  const busy = () => document.hidden || typing(document.activeElement) || !window.getSelection().isCollapsed;

  async function again() {
    const main = document.getElementById("main");
    const seconds = Number(main.dataset.live);
    if (!seconds) return;
    try {
      const answer = busy() ? null : await fetch(location.href, { credentials: "same-origin" });
      if (answer && answer.ok && !busy()) {
        const text = trusted.createHTML(await answer.text());
        const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("main");
        if (fresh && fresh.innerHTML !== main.innerHTML) {
          const opened = [...main.querySelectorAll("details")].map((one) => one.open);
          const row = at();
          main.replaceWith(document.adoptNode(fresh));
          [...fresh.querySelectorAll("details")].forEach((one, n) => { one.open = !!opened[n]; });
          if (row >= 0 && rows()[row]) rows()[row].classList.add("at");
        }
      }
    } catch { /* the viewer has stopped: keep the page */ }
    setTimeout(again, 1000 * seconds);
  }
  setTimeout(again, 1000 * Number(document.getElementById("main").dataset.live));
})();
