// Light and dark: the system's choice, or the user's (key d), kept in the browser.
import { signal } from "./lib.js";

const system = matchMedia("(prefers-color-scheme: dark)");
const stored = () => {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null; // storage is turned off
  }
};

/** "light" or "dark", as shown now. Charts are drawn again when it changes. */
export const theme = signal("light");

function apply() {
  const chosen = stored();
  theme.value = chosen ?? (system.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme.value;
}

system.addEventListener("change", apply);
apply();

/** Switches to the other theme. */
export function switchTheme() {
  try {
    localStorage.setItem("theme", theme.value === "dark" ? "light" : "dark");
  } catch {
    document.documentElement.dataset.theme = theme.value = theme.value === "dark" ? "light" : "dark";
    return;
  }
  apply();
}

/** The value of a CSS variable in the theme of now. */
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Colour of the n-th series. */
export const seriesColour = (index) => css(`--series-${index % 8}`);
