// The address is the state: a page reads its path and query from here and writes its query here.
import { signal } from "./lib.js";

const read = () => ({ path: location.pathname, query: Object.fromEntries(new URLSearchParams(location.search)) });

/** The present path and query. */
export const place = signal(read());

addEventListener("popstate", () => (place.value = read()));

/** An address of a path and a query; empty values are left out. */
export function address(path, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(kept).toString();
  return text ? `${path}?${text}` : path;
}

/** Opens an address of this dashboard. */
export function go(href, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](replace ? history.state : { inside: true }, "", href);
  place.value = read();
  if (!replace) scrollTo(0, 0);
}

/** Changes some values of the query. `null` removes one. */
export function setQuery(patch, { replace = true } = {}) {
  go(address(place.value.path, { ...place.value.query, ...patch }), { replace });
}

/** The address of a page of a run. Names are encoded: a run's name may hold a slash. */
export function runPath(run, ...parts) {
  return ["/run", run, ...parts].map((part, index) => (index ? encodeURIComponent(part) : part)).join("/");
}

/** Plain clicks on links of this dashboard change the page without loading it again. */
export function catchLinks() {
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href]");
    if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const url = new URL(link.href);
    if (url.origin !== location.origin || url.pathname.startsWith("/api/") || link.hasAttribute("download") || link.target) return;
    event.preventDefault();
    go(url.pathname + url.search);
  });
}
