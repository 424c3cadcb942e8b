// The page's keys, drawers and theme. Gradio recreates its components, so the listeners are on the document.
(() => {
  const byId = (id) => document.getElementById(id);
  const inner = (id, what) => document.querySelector(`#${id} ${what}, ${what}#${id}`);

  function setTheme(dark) {
    document.body.classList.toggle("dark", dark);
    byId("theme")?.setAttribute("aria-pressed", String(dark));
    document.dispatchEvent(new CustomEvent("themechange", { detail: { dark } }));
  }

  function toggleTheme() {
    const dark = !document.body.classList.contains("dark");
    localStorage.setItem("mlx-llama3-theme", dark ? "dark" : "light");
    setTheme(dark);
  }

  function chosenTheme() {
    const chosen = localStorage.getItem("mlx-llama3-theme");
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  const DRAWERS = { "open-settings": "settings-drawer", "open-convert": "convert-drawer" };

  function toggleDrawer(button) {
    for (const [opener, drawer] of Object.entries(DRAWERS)) {
      const open = opener === button && !byId(drawer).classList.contains("open");
      byId(drawer).classList.toggle("open", open);
      byId(opener).setAttribute("aria-expanded", String(open));
      if (open) byId(drawer).querySelector("input, textarea")?.focus();
    }
  }

  function closeDrawer() {
    const open = Object.entries(DRAWERS).find(([, drawer]) => byId(drawer)?.classList.contains("open"));
    if (open) {
      toggleDrawer(open[0]);
      byId(open[0]).focus();
    }
    return Boolean(open);
  }

  function focusComposer() {
    inner("composer", "textarea")?.focus();
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.id in DRAWERS) toggleDrawer(button.id);
    else if (button.id === "theme") toggleTheme();
    else if (button.id === "show-keys") byId("keys").showModal();
    else if (button.classList.contains("close-drawer")) closeDrawer();
  });

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    const typing = event.target.closest("input:not([type=range]):not([type=radio]):not([type=checkbox]), textarea, select");
    if (event.key === "Escape") {
      const stop = byId("stop");
      if (byId("keys").open) return; // the dialog closes itself
      if (stop && stop.offsetParent !== null) stop.click();
      else if (!closeDrawer() && typing) event.target.blur();
    } else if (event.key === "/" && !typing) {
      event.preventDefault();
      focusComposer();
    } else if (event.key === "?" && !typing) {
      event.preventDefault();
      byId("keys").showModal();
    }
  });

  // Retried until Gradio has created all elements; it also sets the theme's class itself while it starts.
  function settle() {
    const drawers = Object.values(DRAWERS).map(byId);
    const others = ["theme", "show-keys", "composer", ...Object.keys(DRAWERS)].map(byId);
    if ([...drawers, ...others].includes(null)) return false;
    const headings = drawers.map((drawer) => drawer.querySelector("h2"));
    if (headings.includes(null)) return false; // a drawer is created before its content
    setTheme(chosenTheme());
    drawers.forEach((drawer, i) => {
      drawer.setAttribute("role", "region");
      drawer.setAttribute("aria-label", headings[i].textContent);
    });
    for (const opener of Object.keys(DRAWERS)) byId(opener).setAttribute("aria-expanded", "false");
    byId("theme").setAttribute("aria-label", "Dark colours");
    byId("show-keys").setAttribute("aria-label", "Keys");
    return true;
  }

  const waiting = setInterval(() => settle() && clearInterval(waiting), 50);
})();
