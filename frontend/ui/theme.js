// Runs before anything is painted: the chosen theme must not flash in later.
"use strict";
try {
  const theme = localStorage.getItem("tokenwire-theme");
  if (theme === "light" || theme === "dark") {
    document.documentElement.dataset.theme = theme;
  }
} catch {
  // Storage may be forbidden; then the system's theme it is.
}
