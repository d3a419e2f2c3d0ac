// Environments: pools over time, tools, and which chain holds which environment now.
import { html, useMemo } from "../lib.js";
import { runApi, useData } from "../api.js";
import { address, runPath, setQuery } from "../router.js";
import { Card, Chip, Choice, Empty, Loaded, OutcomeChip, Spark, Stat } from "../parts.js";
import { Chart } from "../chart.js";
import { align } from "../curves.js";
import { seriesColour, theme } from "../theme.js";
import { clean, json, num, percent, seconds, when, words } from "../format.js";

const FIGURES = ["allocated", "idle", "waiting", "warming", "closing"];
const COUNTERS = ["started", "recycled", "failed", "reaped"];

export default function Environments({ run, query }) {
  const envs = useData(runApi(run, "envs"), {}, { run });
  return html`<header class="page-head"><div><h1>Environments</h1><p class="sub">Pools, tools, and the chains that hold an environment.</p></div></header>
    <${Loaded} from=${envs} rows=${8}>${(data) => html`<${Body} run=${run} data=${data} query=${query} />`}<//>`;
}

function Body({ run, data, query }) {
  const all = [...new Set([...Object.keys(data.pools), ...Object.keys(data.steps)])];
  const kinds = all.length > 1 ? all.filter((kind) => kind !== "total") : all; // the sum of one pool is that pool
  const by = query.by === "step" || !Object.keys(data.pools).length ? "step" : "time";
  return html`<div class="stack-y">
    ${kinds.length ? html`<div class="grid two">${kinds.map((kind) => html`<${Pool} key=${kind} kind=${kind} by=${by} over=${(by === "time" ? data.pools : data.steps)[kind] ?? {}} latest=${{ ...last(data.steps[kind]), ...last(data.pools[kind]) }}
        tools=${Object.keys(data.pools).length > 0 && html`<${Choice} label="Axis" value=${by} options=${[["time", "Time"], ["step", "Step"]]} onPick=${(next) => setQuery({ by: next === "time" ? null : next })} />`} />`)}</div>`
      : html`<${Card}><${Empty} title="No pool was recorded.">A run whose agent has no environment has no pools. Older runs stored one figure per step.<//><//>`}
    ${Object.keys(data.chains ?? {}).length > 0 && html`<${Running} chains=${data.chains} />`}
    <${Card} title="Tools" note="Slowest first, by the 95th percentile." className="flush"><${Tools} run=${run} tools=${data.tools} /><//>
    <${Limits} run=${run} limits=${data.limits ?? []} />
    <${Nodes} nodes=${data.nodes ?? []} />
    <${Leases} run=${run} live=${data.live} />
    <${Failures} run=${run} failures=${data.failures ?? []} />
    <${Events} run=${run} events=${data.events.filter((event) => !["phase", "chain_started", "chain_ended"].includes(event.kind))} /></div>`;
}

const last = (figures) => Object.fromEntries(Object.entries(figures ?? {}).map(([name, points]) => [name, points.at(-1)?.[1]]));

function Pool({ kind, by, over, latest, tools }) {
  const names = FIGURES.filter((name) => over[name]?.length);
  const made = useMemo(() => {
    const start = Math.min(...names.map((name) => over[name][0][0]));
    // A gauge holds its value until the next one: steps are drawn by repeating the value before each change.
    const lines = names.map((name) => hold(over[name].map(([x, y]) => [by === "time" ? x - start : x, y]), by === "time"));
    return { data: align(lines), lines: names.map((name, index) => ({ label: words(name), colour: seriesColour(index), points: false })) };
  }, [over, by, theme.value]);
  return html`<${Card} title=${clean(kind)} tools=${tools}>
    ${names.length ? html`<${Chart} ...${made} time=${by === "time"} height=${170} />` : html`<p class="note">No figures over ${by}.</p>`}
    <div class="stats top-gap small-stats">${[...COUNTERS, "acquire_p95_s"].filter((name) => latest[name] !== undefined && latest[name] !== null).map((name) => html`<${Stat} key=${name} label=${name === "acquire_p95_s" ? "wait, 95th percentile" : name} kind=${name === "failed" && latest[name] > 0 ? "bad" : ""} value=${name.endsWith("_s") ? seconds(latest[name]) : num(latest[name])} />`)}</div><//>`;
}

const PHASES = [["running", "all running"], ["environment", "waiting for an environment"], ["sampling", "sampling"], ["tools", "tools"], ["scoring", "scoring"]];

function Running({ chains }) {
  const there = PHASES.filter(([name]) => chains[name]?.length);
  const made = useMemo(() => {
    const start = Math.min(...there.map(([name]) => chains[name][0][0]));
    const lines = there.map(([name]) => hold(chains[name].map(([x, y]) => [x - start, y]), true));
    return { data: align(lines), lines: there.map(([, label], index) => ({ label, colour: seriesColour(index), points: false })) };
  }, [chains, theme.value]);
  return there.length > 0 && html`<${Card} title="Chains" note="What the running chains did."><${Chart} ...${made} time=${true} height=${170} /><//>`;
}

function hold(points, steps) {
  const rows = [];
  points.forEach(([x, y], index) => {
    if (steps && index && points[index - 1][1] !== y) rows.push([x - 1e-3, points[index - 1][1]]);
    rows.push([x, y]);
  });
  return { x: rows.map((row) => row[0]), y: rows.map((row) => row[1]) };
}

function Tools({ run, tools }) {
  if (!tools.length) return html`<${Empty} title="No tool was called, or the run did not record its calls." />`;
  const slowest = Math.max(1e-9, ...tools.map((tool) => tool.p95_s ?? 0));
  return html`<div class="table-box"><table><thead><tr><th>Tool</th><th class="n">Calls</th><th class="n">Errors</th><th class="n">Median</th><th class="n">95th percentile</th><th class="n wide-only">Longest</th><td class="wide-only"></td></tr></thead>
    <tbody>${tools.map((tool) => html`<tr key=${tool.name}><td><a class="strong mono" href=${address(runPath(run, "chains"), { tool: tool.name })}>${clean(tool.name)}</a></td><td class="n">${num(tool.calls)}</td>
      <td class=${`n ${tool.errors ? "bad-text" : "faint"}`}>${num(tool.errors)}${tool.errors ? ` (${percent(tool.errors / tool.calls)})` : ""}</td><td class="n">${seconds(tool.p50_s)}</td><td class="n">${seconds(tool.p95_s)}</td><td class="n wide-only">${seconds(tool.max_s)}</td>
      <td class="wide-only meter-cell"><span class=${`meter long m${Math.round(((tool.p95_s ?? 0) / slowest) * 10)}`}></span></td></tr>`)}</tbody></table></div>`;
}

const LIMITS = {
  time: "time of a call", memory: "memory", cpu: "CPU time", processes: "processes", disk: "written files", files: "open files", output: "printed output",
};

function Limits({ run, limits }) {
  if (!limits.length) return null;
  const since = limits.find((limit) => limit.since !== null)?.since;
  return html`<${Card} title="Sandbox limits" note=${`Calls that reached a limit of their sandbox${since === undefined ? "" : `, since step ${num(since)}`}.`} className="flush"><div class="table-box"><table>
    <thead><tr><th>Limit</th><th class="n">Calls</th><th class="n">Chains</th><th>Tools</th><th class="n">Last in step</th><th>Newest chains</th></tr></thead>
    <tbody>${limits.map((each) => html`<tr key=${each.limit}><td class="strong">${LIMITS[each.limit] ?? clean(each.limit)}</td><td class="n">${num(each.count)}</td><td class="n">${num(each.chains)}</td>
      <td class="mono wrap-anywhere">${each.tools.map(clean).join(", ")}</td><td class="n">${each.step === null ? "–" : html`<a class="inline-link" href=${runPath(run, "steps", each.step)}>${num(each.step)}</a>`}</td>
      <td class="wrap-anywhere">${each.newest.map((id, index) => html`${index ? ", " : ""}<a key=${id} class="inline-link" href=${runPath(run, "chain", id)}>${clean(id)}</a>`)}</td></tr>`)}</tbody></table></div><//>`;
}

const NODE_FIGURES = [["samplers", "Samplers"], ["env_hosts", "Environment servers"], ["chains", "Chains"], ["cpus", "CPUs"]];

/** The machines of a run over several: the newest figures, and each over the steps. */
function Nodes({ nodes }) {
  if (!nodes.length) return null;
  const there = NODE_FIGURES.filter(([figure]) => nodes.some((node) => node.figures[figure]?.length));
  const cell = (points, label) => html`<span class="node-figure"><span class="tnum">${num(points?.at(-1)?.[1] ?? null)}</span><${Spark} values=${(points ?? []).map(([, value]) => value)} width=${90} height=${24} label=${`${label} over the steps`} /></span>`;
  return html`<${Card} title="Nodes" note="Machines of the run: the newest step, and the course over the steps." className="flush"><div class="table-box" role="region" aria-label="Nodes" tabindex="0"><table>
    <thead><tr><th>Node</th>${there.map(([figure, label]) => html`<th key=${figure}>${label}</th>`)}</tr></thead>
    <tbody>${nodes.map((node) => html`<tr key=${node.node}><td class="strong wrap-anywhere">${clean(node.node)}</td>${there.map(([figure, label]) => html`<td key=${figure}>${cell(node.figures[figure], `${label} of ${clean(node.node)}`)}</td>`)}</tr>`)}</tbody></table></div><//>`;
}

function Leases({ run, live }) {
  const told = live?.leases;
  const leases = Array.isArray(told?.data) ? told.data : [];
  return html`<${Card} title="Leases held now" note=${told ? `As of ${when(told.t)}.` : ""} className="flush">
    ${!leases.length ? html`<${Empty} title="No chain holds an environment now." />`
      : html`<div class="table-box"><table><thead><tr><th>Chain</th><th>Environment</th><th>Task</th><th class="n">Turn</th><th>Now</th></tr></thead><tbody>
        ${leases.map((lease, index) => html`<tr key=${index}><td class="wrap-anywhere"><a class="strong" href=${runPath(run, "chain", lease.chain)}>${clean(lease.chain)}</a></td><td>${clean(lease.kind)}</td><td class="wrap-anywhere">${clean(lease.task ?? "–")}</td><td class="n">${lease.turn === null || lease.turn === undefined ? "–" : num(lease.turn)}</td><td>${lease.phase ? html`<${Chip}>${words(clean(lease.phase))}<//>` : ""}</td></tr>`)}</tbody></table></div>`}<//>`;
}

function Failures({ run, failures }) {
  if (!failures.length) return null;
  return html`<${Card} title="Failures" note="Errors of the newest failed chains." className="flush"><div class="table-box"><table><tbody>
    ${failures.map((failure, index) => html`<tr key=${index}><td class="n">${num(failure.count)}</td><td class="wrap-anywhere"><a class="strong" href=${runPath(run, "chain", failure.chain)}>${clean(failure.error)}</a></td><td><${OutcomeChip} outcome=${failure.outcome} /></td><td class="n"><a class="inline-link" href=${runPath(run, "steps", failure.step)}>step ${num(failure.step)}</a></td></tr>`)}</tbody></table></div><//>`;
}

function Events({ run, events }) {
  if (!events.length) return null;
  return html`<${Card} title="Events" note="Newest first." className="flush"><div class="table-box"><table><tbody>
    ${[...events].reverse().slice(0, 60).map((event) => html`<tr key=${event.key}><td class="faint tnum nowrap">${when(event.t)}</td><td>${event.step === null ? "" : html`<a class="inline-link" href=${runPath(run, "steps", event.step)}>step ${event.step}</a>`}</td>
      <td><${Chip} kind=${/fail|error|reap|limit|kill/.test(event.kind) ? "bad" : ""}>${words(clean(event.kind))}<//></td><td class="wrap-anywhere">${clean(event.who ?? "")}</td><td class="faint wrap-anywhere">${clean(Object.keys(event.data ?? {}).length ? json(event.data, 0) : "").slice(0, 200)}</td></tr>`)}</tbody></table></div><//>`;
}
