// All runs: state, what they train, how far they are, and which to compare.
import { html, useState } from "../lib.js";
import { useData } from "../api.js";
import { address, go, runPath, setQuery } from "../router.js";
import { Card, Empty, Loaded, Spark, StateDot } from "../parts.js";
import { useKeys } from "../keys.js";
import { ago, clean, num, percent } from "../format.js";

const SORTS = {
  age: (a, b) => (b.updated ?? 0) - (a.updated ?? 0), name: (a, b) => a.name.localeCompare(b.name),
  best: (a, b) => (b.best_validation ?? -Infinity) - (a.best_validation ?? -Infinity), step: (a, b) => (b.step ?? 0) - (a.step ?? 0),
};
const COLUMNS = [["name", "Run"], [null, "Model", "wide-only"], [null, "World", "wide-only"], [null, "Algorithm", "wide-only"], ["step", "Step", "n"], [null, "Reward", "wide-only"], ["best", "Best validation", "n"], ["age", "Updated", "n wide-only"]];

export default function Runs({ query }) {
  const runs = useData("/api/runs", {}, { run: "*" });
  const [cursor, setCursor] = useState(null);
  const ticked = (query.tick ?? "").split(",").filter(Boolean).map(decodeURIComponent);
  const tick = (name) => {
    const next = ticked.includes(name) ? ticked.filter((each) => each !== name) : [...ticked, name].slice(-8);
    setQuery({ tick: next.map(encodeURIComponent).join(",") || null });
  };
  const shown = select(runs.data ?? [], query);
  useKeys({
    j: () => setCursor(Math.min((cursor ?? -1) + 1, shown.length - 1)), k: () => setCursor(Math.max((cursor ?? 1) - 1, 0)),
    Enter: () => shown[cursor] && go(runPath(shown[cursor].name)),
  });
  const compare = address("/compare", { runs: ticked.map(encodeURIComponent).join(",") });
  return html`<header class="page-head"><div><h1>Runs</h1><p class="sub">${summary(runs.data)}</p></div>
    <div class="tools">
      <input type="search" data-search placeholder="Search runs" aria-label="Search runs" value=${query.q ?? ""} onInput=${(event) => setQuery({ q: event.target.value })} />
      <a class=${`button ${ticked.length > 1 ? "primary" : ""}`} aria-disabled=${ticked.length < 2} href=${ticked.length > 1 ? compare : undefined}
        title=${ticked.length > 1 ? "" : "Tick two or more runs."}>Compare${ticked.length ? ` ${ticked.length}` : ""}</a>
    </div></header>
    <${Loaded} from=${runs} rows=${8}>${(all) =>
      !all.length
        ? html`<${Card}><${Empty} title="No runs here yet.">Start one with agentfly train quickstart. It appears on this page as soon as it writes.<//><//>`
        : !shown.length
          ? html`<${Card}><${Empty} title="No run matches the search." /><//>`
          : html`<${Table} runs=${shown} ticked=${ticked} tick=${tick} cursor=${cursor} sort=${query.sort ?? "age"} />`}<//>`;
}

function select(runs, { q = "", sort = "age" }) {
  const wanted = q.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (run) => [run.name, run.model, run.world, run.algorithm, run.state].join(" ").toLowerCase();
  return runs.filter((run) => wanted.every((word) => text(run).includes(word))).sort(SORTS[sort] ?? SORTS.age);
}

function summary(runs) {
  if (!runs) return "";
  const running = runs.filter((run) => run.state === "running").length;
  return `${runs.length} in this folder${running ? `, ${running} running now` : ""}`;
}

function Table({ runs, ticked, tick, cursor, sort }) {
  return html`<${Card} className="flush runs-table"><div class="table-box"><table>
    <thead><tr><th><span class="hidden-label">Compare</span></th>${COLUMNS.map(([key, label, kind]) => html`<th key=${label} class=${kind} aria-sort=${key === sort ? "descending" : undefined}>
      ${key ? html`<button class=${key === sort ? "sorted" : ""} onClick=${() => setQuery({ sort: key })}>${label}</button>` : label}</th>`)}</tr></thead>
    <tbody>${runs.map((run, index) => html`<tr key=${run.name} aria-selected=${index === cursor}>
      <td class="tick"><input type="checkbox" aria-label=${`Compare ${clean(run.name)}`} checked=${ticked.includes(run.name)} onChange=${() => tick(run.name)} /></td>
      <td class="run-name"><a class="strong wrap-anywhere" href=${runPath(run.name)}>${clean(run.name)}</a>${run.problem ? html`<span class="problem">${clean(run.problem)}</span>` : html`<${StateDot} state=${run.state} />`}</td>
      <td class="wrap-anywhere wide-only">${clean(run.model ?? "–")}</td><td class="wide-only">${clean(run.world ?? "–")}</td><td class="wide-only">${clean(run.algorithm ?? "–")}</td>
      <td class="n">${num(run.step)}${run.total_steps ? html`<span class="faint"> / ${num(run.total_steps)}</span>` : ""}</td>
      <td class="spark-cell wide-only"><${Spark} values=${run.spark} label=${`Reward of ${clean(run.name)}`} /></td>
      <td class="n"><strong>${percent(run.best_validation)}</strong>${run.unscored > 0.01 ? html` <span class="faint">${percent(run.unscored)} of chains unscored</span>` : ""}</td><td class="n faint wide-only">${ago(run.updated && Date.now() / 1000 - run.updated)}</td></tr>`)}</tbody>
  </table></div><//>`;
}
