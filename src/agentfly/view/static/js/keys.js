// Keyboard: a page registers what its keys do while it is shown.
import { signal, useLayoutEffect } from "./lib.js";

/** [keys, meaning] of every key, for the help. */
export const KEYS = [
  ["j / k", "next or previous row"], ["Enter", "open the row"], ["g / G", "go to a row by number or chain id, or to the last"], ["[ / ]", "sibling chain before or after"], [", / .", "step before or after"],
  ["/", "filter or search"], ["t", "next colouring of tokens"], ["1 – 4", "tabs"], ["f", "follow a running run"], ["d", "light or dark"],
  ["?", "this help"], ["Esc", "back"],
];
export const helpOpen = signal(false);

const layers = [];

/** While the component is shown, `map[key]` is called for a key. The higher level wins: frame 0, page 1, dialog 2. */
export function useKeys(map, level = 1) {
  // Not useEffect, which waits for the next frame: a key that is pressed before it would do what the page before does with it.
  useLayoutEffect(() => {
    const layer = { map, level };
    layers.push(layer);
    layers.sort((a, b) => a.level - b.level);
    return () => layers.splice(layers.indexOf(layer), 1);
  });
}

const typing = (element) => element?.matches?.("input:not([type=checkbox]):not([type=range]), textarea, select, [contenteditable]");

/** Starts to listen. */
export function startKeys() {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.key === "Enter" && event.target.closest?.("a, button, summary, label")) return;
    for (let i = layers.length - 1; i >= 0; i--) {
      const act = layers[i].map[event.key];
      if (act) {
        event.preventDefault();
        act(event);
        return;
      }
    }
  });
}
