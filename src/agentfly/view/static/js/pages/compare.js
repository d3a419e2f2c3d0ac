// Several runs: curves laid over each other, config difference, results, and a paired test over the same held-out tasks.
import { html, useMemo } from "../lib.js";
import { useData } from "../api.js";
import { address, runPath, setQuery } from "../router.js";
import { Card, Chip, Choice, Empty, Failure, Loaded, StateDot } from "../parts.js";
import { Chart } from "../chart.js";
import { plot, useSeries } from "./metrics.js";
import { DifferenceTable } from "./config.js";
import { theme } from "../theme.js";
import { clean, count, num, signed } from "../format.js";

const METRICS = ["reward/mean", "rollout/success", "validation/success", "validation/reward", "rollout/reply_tokens", "train/entropy", "train/kl", "time/step_s"];

export default function Compare({ query }) {
  const names = (query.runs ?? "").split(",").filter(Boolean).map(decodeURIComponent);
  const compared = useData(names.length > 1 ? "/api/compare" : null, { runs: names.map(encodeURIComponent).join(",") }, { run: "*" });
  if (names.length < 2) return html`<header class="page-head"><h1>Compare</h1></header><${Card}><${Empty} title="Choose two or more runs."><a class="inline-link" href="/">Tick them in the list of runs.</a><//><//>`;
  return html`<header class="page-head"><div><h1>Compare ${names.length} runs</h1><p class="sub">${names.map(clean).join(" · ")}</p></div></header>
    <div class="stack-y"><${Curves} names=${names} query=${query} />
      <${Loaded} from=${compared} rows=${6}>${(data) => html`<${Results} data=${data} /><${Pairs} data=${data} />
        <${Card} title="Config difference" className="flush">${data.config.length ? html`<${DifferenceTable} names=${data.runs.map((run) => run.name)} rows=${data.config} />` : html`<${Empty} title="The configs are equal." />`}<//>
        <${Tasks} data=${data} />`}<//></div>`;
}

function Curves({ names, query }) {
  const known = useData("/api/runs").data ?? [];
  const state = useSeries(names, METRICS);
  const smooth = Number(query.smooth ?? 0);
  const axis = query.x === "time" ? "time" : "step";
  const options = { axis, smooth, log: query.log === "1", bands: query.bands === "1", run: names[0], theme: theme.value, about: known.map(({ name, model, world, algorithm }) => ({ name, model, world, algorithm })) };
  return html`<div class="filter-bar">
      <label class="field"><span>Smoothing ${smooth ? smooth.toFixed(2) : "off"}</span><input type="range" min="0" max="0.98" step="0.02" value=${smooth} onInput=${(event) => setQuery({ smooth: Number(event.target.value) || null })} /></label>
      <div class="field"><span>Axis</span><${Choice} label="Axis" value=${axis} options=${[["step", "Step"], ["time", "Wall time"]]} onPick=${(x) => setQuery({ x: x === "step" ? null : x })} /></div>
      <label class="toggle"><input type="checkbox" checked=${options.log} onChange=${(event) => setQuery({ log: event.target.checked ? "1" : null })} />Log scale</label>
      <label class="toggle"><input type="checkbox" checked=${options.bands} onChange=${(event) => setQuery({ bands: event.target.checked ? "1" : null })} />Bands over seeds</label></div>
    ${state.error ? html`<${Failure} error=${state.error} />` : state.data && html`<div class="grid">${METRICS.map((metric) => html`<${Curve} key=${metric} metric=${metric} names=${names} data=${state.data} options=${options} />`)}</div>`}`;
}

function Curve({ metric, names, data, options }) {
  const made = useMemo(() => plot(metric, names, data, options), [data, JSON.stringify(options)]);
  return made && html`<${Card} title=${metric}><${Chart} ...${made} log=${options.log} time=${options.axis === "time"} height=${170} /><//>`;
}

function Results({ data }) {
  return html`<${Card} title="Results" className="flush"><div class="table-box"><table><thead><tr><th>Metric</th>${data.runs.map((run) => html`<th key=${run.name} class="n"><a href=${runPath(run.name)}>${clean(run.name)}</a></th>`)}</tr></thead>
    <tbody><tr><td>state</td>${data.runs.map((run) => html`<td key=${run.name} class="n"><${StateDot} state=${run.state} /></td>`)}</tr>
    ${data.results.map((row) => {
      const known = row.values.filter((value) => value !== null);
      const best = known.length > 1 && /reward|success|pass_/.test(row.metric) ? Math.max(...known) : null;
      return html`<tr key=${row.metric}><td class="mono">${clean(row.metric)}</td>${row.values.map((value, index) => html`<td key=${index} class=${`n ${value !== null && value === best ? "best" : ""}`}>${num(value)}</td>`)}</tr>`;
    })}</tbody></table></div><//>`;
}

/** A paired result in a sentence. */
function verdict(pair) {
  if (pair.error) return clean(pair.error);
  if (!pair.tasks) return "These runs share no held-out task.";
  return `${clean(pair.verdict)} Difference of ${clean(pair.measure)} over ${count(pair.tasks, "task")}: ${signed(pair.difference)} (95 % interval ${signed(pair.low)} to ${signed(pair.high)}, p = ${num(pair.p, 2)}).${missing(pair)}`;
}

/** How many chains have no score, and what they could change. */
function missing(pair) {
  if (!pair.bounds) return "";
  const lost = pair.scored.map(([scored, all]) => `${num(all - scored)} of ${num(all)}`).join(" and ");
  return ` ${lost} chains have no score: with them the difference is between ${signed(pair.bounds[0])} and ${signed(pair.bounds[1])}.`;
}

function Pairs({ data }) {
  if (!data.pairs.length) return null;
  return html`<${Card} title="The same held-out tasks" note="Each run against the first, task by task."><ul class="pairs">${data.pairs.map((pair) => html`<li key=${pair.b}>
    <p><strong>${clean(pair.b)}</strong> <span class="faint">against</span> ${clean(pair.a)}</p><p>${verdict(pair)}</p>
    ${pair.tasks > 0 && html`<div class="chips"><${Chip} kind="good" label="won">${num(pair.wins)}<//><${Chip} label="equal">${num(pair.ties)}<//><${Chip} kind="bad" label="lost">${num(pair.losses)}<//></div>`}</li>`)}</ul><//>`;
}

function Tasks({ data }) {
  const rows = (data.tasks ?? []).filter((row) => new Set(row.values).size > 1).slice(0, 200);
  if (!rows.length) return null;
  return html`<${Card} title="Tasks that differ" note="Rewards of the newest validation." className="flush"><div class="table-box"><table><thead><tr><th>Task</th>${data.runs.map((run) => html`<th key=${run.name} class="n">${clean(run.name)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.task_id}><td class="wrap-anywhere">${clean(row.task_id)}</td>${row.values.map((value, index) => html`<td key=${index} class="n"><a class="strong" href=${row.chains?.[index] ? runPath(data.runs[index].name, "chain", row.chains[index]) : address(runPath(data.runs[index].name, "chains"), { task: row.task_id, split: "validation" })}>${num(value, 3)}</a></td>`)}</tr>`)}</tbody></table></div><//>`;
}
