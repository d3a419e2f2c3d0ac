// The frame: sidebar, navigation, help, and which module shows the page of the present address.
import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./lib.js";
import { connected, follow, listen, runApi, useData } from "./api.js";
import { address, catchLinks, go, place, runPath } from "./router.js";
import { Card, Empty, Failure, Loading, StateDot } from "./parts.js";
import { KEYS, helpOpen, startKeys, useKeys } from "./keys.js";
import { switchTheme, theme } from "./theme.js";
import { clean } from "./format.js";
import { Icon } from "./icons.js";

const RUN_PAGES = [
  ["", "Overview", "overview"], ["metrics", "Metrics", "metrics"], ["steps", "Steps", "steps"], ["chains", "Chains", "chains"],
  ["envs", "Environments", "envs"], ["checks", "Health", "checks"], ["config", "Config", "config"], ["chat", "Try it", "chat"],
];
// First part of the path below a run -> module, and which entry of the navigation it belongs to.
const MODULES = {
  "": ["overview", ""], metrics: ["metrics", "metrics"], steps: ["step", "steps"], chains: ["chains", "chains"], chain: ["chain", "chains"],
  group: ["group", "steps"], envs: ["envs", "envs"], checks: ["health", "checks"], config: ["config", "config"], chat: ["chat", "chat"],
};

/** {module, params, section} of a path; null if there is no such page. */
function route(path) {
  let parts;
  try {
    parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    return null; // the path is not valid UTF-8
  }
  if (!parts.length) return { module: "runs", params: [], section: "runs" };
  if (parts[0] === "compare" && parts.length === 1) return { module: "compare", params: [], section: "compare" };
  if (parts[0] !== "run" || parts.length < 2) return null;
  const known = Object.hasOwn(MODULES, parts[2] ?? "") && MODULES[parts[2] ?? ""];
  return known ? { module: known[0], run: parts[1], params: parts.slice(3), section: known[1] } : null;
}

const loaded = new Map();

function Page({ found, about }) {
  const [, redraw] = useState(0);
  const [error, setError] = useState(null);
  const module = loaded.get(found.module);
  useEffect(() => {
    if (module) return;
    import(`./pages/${found.module}.js`).then(
      (made) => {
        loaded.set(found.module, made.default);
        redraw((count) => count + 1);
      },
      (failure) => setError(failure),
    );
  }, [found.module]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!module) return html`<${Loading} rows=${6} />`;
  return html`<${module} key=${`${found.module}/${found.run ?? ""}`} run=${found.run} about=${about} params=${found.params} query=${place.value.query} />`;
}

function Side({ found, about }) {
  const run = found?.run;
  return html`<aside class="side" aria-label="Run and pages"><div class="side-in">
    <a class="brand" href="/" title="All runs"><img src="/static/favicon.svg" alt="" width="24" height="24" />AgentFly</a>
    ${run && html`<div class="side-run"><strong>${clean(run)}</strong>${about.state && html`<${StateDot} state=${about.state} />`}</div>`}
    <nav class="nav" aria-label="Pages">
      <a href="/" aria-current=${found?.section === "runs" ? "page" : undefined}><${Icon} name="runs" />Runs</a>
      ${found?.section === "compare" && html`<a href=${address("/compare", place.value.query)} aria-current="page"><${Icon} name="compare" />Compare</a>`}
      ${run && html`<span class="nav-line"></span>`}
      ${run && RUN_PAGES.map(([part, label, icon]) => html`
        <a key=${part} href=${part ? runPath(run, part) : runPath(run)} aria-current=${found.section === part ? "page" : undefined}><${Icon} name=${icon} />${label}</a>`)}
    </nav>
    <div class="side-foot">
      <button class="icon-button optional" title=${follow.value ? "Pages follow a running run (f)" : "Pages stand still (f)"} aria-label=${`${follow.value ? "Live" : "Paused"}: follow a running run`} aria-pressed=${follow.value} onClick=${() => (follow.value = !follow.value)}>
        <${Icon} name="live" />${follow.value ? "Live" : "Paused"}</button>
      <button class="icon-button" title="Light or dark (d)" aria-label="Light or dark" onClick=${switchTheme}><${Icon} name=${theme.value === "dark" ? "sun" : "moon"} /></button>
      <button class="icon-button optional" title="Keys (?)" aria-label="Keys" onClick=${() => (helpOpen.value = true)}>?</button>
    </div></div>
  </aside>`;
}

/** The first Tab of a page leads past the navigation. */
const skip = () => document.getElementById("main").focus();

function Help() {
  const close = useRef(null);
  useLayoutEffect(() => {
    const before = document.activeElement;
    close.current.focus();
    return () => before?.isConnected && before.focus();
  }, []);
  // The dialog has one control, so Tab stays on it.
  const hold = (event) => event.key === "Tab" && event.preventDefault();
  useKeys({ Escape: () => (helpOpen.value = false), "?": () => (helpOpen.value = false) }, 2);
  return html`<div class="dialog" role="dialog" aria-modal="true" aria-label="Keys" onKeyDown=${hold} onClick=${(event) => event.target === event.currentTarget && (helpOpen.value = false)}>
    <${Card} title="Keys" tools=${html`<button class="button" ref=${close} onClick=${() => (helpOpen.value = false)}>Close</button>`}>
      <div class="keys">${KEYS.map(([keys, meaning]) => html`<kbd key=${keys}>${keys}</kbd><span>${meaning}</span>`)}</div><//></div>`;
}

/** Where Esc leads: from a part of a run to what holds it. */
function parent({ run, module, params }) {
  if (!run) return "/";
  if (module === "chain") return runPath(run, "chains");
  if (module === "group") return runPath(run, "steps", params[0] ?? "latest");
  return module === "overview" ? "/" : runPath(run);
}

/** What a page is called in the title of its tab. */
function title(found) {
  if (!found) return "No such page";
  if (found.module === "chain" || found.module === "group") return `${found.module === "chain" ? "Chain" : "Group"} ${clean(found.params.at(-1) ?? "")}`;
  if (found.module === "step") return `Step ${clean(found.params[0] ?? "")}`;
  return found.run ? RUN_PAGES.find(([part]) => part === found.section)?.[1] : found.module === "compare" ? "Compare" : "Runs";
}

function App() {
  const found = route(place.value.path);
  const asked = useData(found?.run ? runApi(found.run) : null, {}, { run: found?.run });
  const about = (found?.run && asked.fresh && asked.data) || {};
  const missing = found?.run && asked.fresh && asked.error;
  useKeys({
    d: switchTheme, "?": () => (helpOpen.value = true), f: () => (follow.value = !follow.value),
    "/": () => document.querySelector("[data-search]")?.focus(),
    Escape: () => found && (found.run || found.module !== "runs") && (history.state?.inside ? history.back() : go(parent(found))),
  }, 0);
  useEffect(() => {
    document.title = [title(found), found?.run && clean(found.run), "AgentFly"].filter(Boolean).join(" · ");
  }, [place.value.path]);
  useEffect(() => {
    // scrollIntoView would also make the link the place from which the next Tab goes on.
    const link = document.querySelector(".nav [aria-current]");
    if (link) link.parentElement.scrollLeft = link.offsetLeft - (link.parentElement.clientWidth - link.offsetWidth) / 2;
  }, [found?.section, found?.run]);
  return html`<div class="shell"><button class="skip" onClick=${skip}>Skip the navigation</button><${Side} found=${found} about=${about} /><main class="main" id="main" tabindex="-1">
      ${!connected.value && html`<p class="offline" role="status">The dashboard does not answer. What you see may be old; the page connects again by itself.</p>`}
      ${missing ? html`<${Failure} error=${missing} retry=${asked.reload} />` : found ? html`<${Page} found=${found} about=${about} />` : html`<${Empty} title="There is no such page."><a class="inline-link" href="/">All runs</a><//>`}
    </main>${helpOpen.value && html`<${Help} />`}</div>`;
}

const first = route(location.pathname);
if (first) import(`./pages/${first.module}.js`).then((made) => loaded.set(first.module, made.default), () => null);
catchLinks();
startKeys();
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
listen();
