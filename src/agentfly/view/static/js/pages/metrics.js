// All metrics of a run, other runs laid over them, with smoothing, bands over seeds, log axes, and step or wall time.
import { html, useEffect, useMemo, useState } from "../lib.js";
import { get, newsOf, runApi, useData, useLive } from "../api.js";
import { go, runPath, setQuery } from "../router.js";
import { Card, Choice, Empty, Failure, Loading } from "../parts.js";
import { Chart, faded } from "../chart.js";
import { align, band, curve, families, positive } from "../curves.js";
import { seriesColour, theme } from "../theme.js";
import { clean, words } from "../format.js";
import { Sources } from "../sources.js";

const GROUPS = [["reward", "Reward"], ["validation", "Validation"], ["rollout", "Rollout"], ["train", "Training"], ["time", "Time"], ["resources", "Environments"]];
const SHOWN = 24;

export default function Metrics({ run, about, query }) {
  const others = list(query.with);
  const runs = [run, ...others.filter((name) => name !== run)];
  const smooth = Number(query.smooth ?? 0);
  const axis = query.x === "time" ? "time" : "step";
  const all = about.metrics ?? [];
  const names = useMemo(() => wanted(all, query.q ?? ""), [all, query.q]);
  const [most, setMost] = useState(SHOWN);
  useEffect(() => setMost(SHOWN), [query.q]);
  const shown = names.slice(0, most);
  const { data, error } = useSeries(runs, shown.map((metric) => metric.name));
  const known = useData("/api/runs").data ?? [];
  const kinds = known.map(({ name, model, world, algorithm }) => ({ name, model, world, algorithm }));
  const options = { axis, smooth, log: query.log === "1", bands: query.bands === "1", run, theme: theme.value, about: kinds, height: names.length > 2 ? 170 : 320 };
  return html`<header class="page-head"><div><h1>Metrics</h1><p class="sub">${runs.length > 1 ? `${runs.map(clean).join(", ")}` : "Click a point to open that step's chains."}</p></div></header>
    <div class="filter-bar">
      <label class="field grow"><span>Metric</span><input type="search" data-search placeholder="reward, validation, entropy …" value=${query.q ?? ""} onInput=${(event) => setQuery({ q: event.target.value })} /></label>
      <${OverlayPicker} names=${known.map((each) => each.name).filter((name) => name !== run && !others.includes(name))} others=${others} />
      <label class="field"><span>Smoothing ${smooth ? smooth.toFixed(2) : "off"}</span>
        <input type="range" min="0" max="0.98" step="0.02" value=${smooth} onInput=${(event) => setQuery({ smooth: Number(event.target.value) || null })} /></label>
      <div class="field"><span>Axis</span><${Choice} label="Axis" value=${axis} options=${[["step", "Step"], ["time", "Wall time"]]} onPick=${(x) => setQuery({ x: x === "step" ? null : x })} /></div>
      <label class="toggle"><input type="checkbox" checked=${options.log} onChange=${(event) => setQuery({ log: event.target.checked ? "1" : null })} />Log scale</label>
      <label class="toggle" title="Runs whose names differ by their seed become a mean with a band from the lowest to the highest."><input type="checkbox" checked=${options.bands} onChange=${(event) => setQuery({ bands: event.target.checked ? "1" : null })} />Bands over seeds</label>
    </div>
    ${error ? html`<${Failure} error=${error} />` : !data ? html`<${Loading} />` : !names.length ? html`<${Card}><${Empty} title=${all.length ? "No metric has this name." : "No metrics yet."} /><//>`
      : sections(shown).map(([title, group]) => html`<section key=${title} class="metric-group"><h2 class="group-title">${title}</h2>
          <div class=${`grid ${names.length > 2 ? "" : "few"}`}>${group.map((metric) => html`<${MetricCard} key=${metric.name} metric=${metric} runs=${runs} data=${data} options=${options} />`)}</div></section>`)}
    ${data && !query.q && all.some((metric) => metric.name.startsWith("validation/")) && html`<${Sources} run=${run} validations=${1} field=${query.source} />`}
    ${data && names.length > most && html`<button class="button" onClick=${() => setMost(most + SHOWN)}>Show ${Math.min(SHOWN, names.length - most)} more of ${names.length}</button>`}`;
}

const list = (text) => (text ?? "").split(",").filter(Boolean).map(decodeURIComponent);

function wanted(metrics, q) {
  const parts = q.toLowerCase().split(/\s+/).filter(Boolean);
  const found = metrics.filter((metric) => parts.every((part) => metric.name.toLowerCase().includes(part) || (metric.description ?? "").toLowerCase().includes(part)));
  const rank = (metric) => (GROUPS.findIndex(([prefix]) => metric.name.startsWith(`${prefix}/`)) + 50) % 50;
  return found.map((metric, index) => [rank(metric), index, metric]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , metric]) => metric);
}

function sections(metrics) {
  const found = new Map();
  for (const metric of metrics) {
    const prefix = metric.name.split("/")[0];
    const title = GROUPS.find(([each]) => each === prefix)?.[1] ?? words(prefix);
    found.set(title, [...(found.get(title) ?? []), metric]);
  }
  return [...found];
}

/** {data: {run: {metric: points}}, error} of several runs. */
export function useSeries(runs, names) {
  const [state, setState] = useState({ data: null, error: null });
  useLive(JSON.stringify([runs, names]), runs.map(newsOf).join(), async (abort) => {
    try {
      const ask = (run) => (names.length ? get(runApi(run, "series"), { names: names.join(",") }, abort) : {});
      const answers = await Promise.all(runs.map(ask));
      if (!abort.aborted) setState({ data: Object.fromEntries(runs.map((run, index) => [run, answers[index]])), error: null });
    } catch (error) {
      if (!abort.aborted) setState((before) => ({ ...before, error }));
    }
  });
  return state;
}

function OverlayPicker({ names, others }) {
  const change = (next) => setQuery({ with: next.map(encodeURIComponent).join(",") || null });
  return html`<div class="field"><span>Overlay runs</span><div class="tools">
    ${others.map((name) => html`<button key=${name} class="chip accent" title="Remove" onClick=${() => change(others.filter((each) => each !== name))}><span class="chip-value">${clean(name)}</span> ×</button>`)}
    <select aria-label="Overlay a run" value="" onChange=${(event) => event.target.value && change([...others, event.target.value])}>
      <option value="">${others.length ? "Add" : "None"}</option>${names.map((name) => html`<option key=${name} value=${name}>${clean(name)}</option>`)}</select></div></div>`;
}

function MetricCard({ metric, runs, data, options }) {
  const made = useMemo(() => plot(metric.name, runs, data, options), [metric.name, runs.join(), data, JSON.stringify(options)]);
  if (!made) return null;
  const open = (x, index) => go(runPath(options.run, "steps", made.stepAt(x, index)));
  return html`<${Card} title=${clean(metric.name)} note=${clean(metric.description ?? "")}>
    <${Chart} ...${made} log=${options.log} time=${options.axis === "time"} height=${options.height} label=${`${metric.name} over ${options.axis}`} onPick=${open} /><//>`;
}

/** What Chart needs for one metric of several runs; null if no run has it. */
export function plot(name, runs, data, { axis, smooth, log, bands: banded, run, about }) {
  const usable = (values) => (log ? positive(values) : values);
  const curves = runs.map((each) => [each, curve(data[each]?.[name], axis, smooth)]).filter(([, line]) => line.x.length);
  if (!curves.length) return null;
  const own = curves.find(([each]) => each === run)?.[1] ?? curves[0][1];
  const stepAt = (x) => {
    const nearest = own.x.reduce((best, each, index) => (Math.abs(each - x) < Math.abs(own.x[best] - x) ? index : best), 0);
    return own.steps[nearest];
  };
  const lineOf = new Map(curves);
  const grouped = banded ? families([...lineOf.keys()], about) : curves.map(([each]) => [each, [each]]);
  const columns = [];
  const lines = [];
  const bands = [];
  grouped.forEach(([label, runsOfIt], index) => {
    const colour = seriesColour(index);
    const members = runsOfIt.map((each) => lineOf.get(each));
    if (members.length === 1) {
      if (smooth) {
        const raw = curve(data[runsOfIt[0]][name], axis);
        columns.push({ x: raw.x, y: usable(raw.y) });
        lines.push({ label: "not smoothed", colour: faded(colour, 0.28), thin: true, points: false });
      }
      columns.push({ x: members[0].x, y: usable(members[0].y) });
      lines.push({ label: clean(label), colour });
      return;
    }
    const spread = band(members);
    bands.push([columns.length + 2, columns.length + 1, faded(colour, 0.16)]);
    columns.push({ x: spread.x, y: usable(spread.mean) }, { x: spread.x, y: usable(spread.low) }, { x: spread.x, y: usable(spread.high) });
    lines.push({ label: `${clean(label)} (${members.length} seeds)`, colour });
    for (const edge of ["lowest", "highest"]) lines.push({ label: edge, colour: faded(colour, 0.35), thin: true, points: false });
  });
  return { data: align(columns), lines, bands, stepAt };
}
