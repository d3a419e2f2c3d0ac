// The config of a run, and its difference to another run's.
import { html, useMemo } from "../lib.js";
import { runApi, useData } from "../api.js";
import { setQuery } from "../router.js";
import { Card, Choice, Empty, Loaded, Select, Text } from "../parts.js";
import { flatten } from "../layout.js";
import { clean, json } from "../format.js";

export default function Config({ run, query }) {
  const mine = useData(runApi(run, "config"));
  const runs = useData("/api/runs");
  const other = query.against && query.against !== run ? query.against : null;
  const theirs = useData(other ? runApi(other, "config") : null);
  const names = (runs.data ?? []).map((each) => each.name).filter((name) => name !== run);
  const form = query.form ?? "keys";
  return html`<header class="page-head"><div><h1>Config</h1><p class="sub">${other ? `Compared with ${clean(other)}` : "What the run was started with."}</p></div>
    <div class="tools"><${Select} label="Compare with" value=${other} options=${[["", "no other run"], ...names.map((name) => [name, name])]} onPick=${(against) => setQuery({ against })} />
      ${!other && html`<div class="field"><span>Form</span><${Choice} label="Form" value=${form} options=${[["keys", "Keys"], ["file", "File"]]} onPick=${(next) => setQuery({ form: next === "keys" ? null : next })} /></div>`}</div></header>
    <${Loaded} from=${mine} rows=${8}>${(data) =>
      other ? html`<${Loaded} from=${theirs}>${(them) => html`<${Difference} names=${[run, other]} configs=${[data.config, them.config]} all=${query.all === "1"} />`}<//>`
        : form === "file" ? html`<pre class="raw" tabindex="0"><${Text}>${data.text}<//></pre>` : html`<${Keys} config=${data.config} q=${query.q ?? ""} />`}<//>`;
}

function Keys({ config, q }) {
  const all = useMemo(() => Object.entries(flatten(config)), [config]);
  const rows = all.filter(([key, value]) => `${key} ${json(value, 0)}`.toLowerCase().includes(q.toLowerCase()));
  return html`<${Card} className="flush"><div class="card-search"><input type="search" data-search placeholder="Search keys" aria-label="Search keys" value=${q} onInput=${(event) => setQuery({ q: event.target.value || null })} /></div>
    ${rows.length ? html`<div class="table-box"><table class="keys-table"><tbody>${rows.map(([key, value]) => html`<tr key=${key}><td class="mono soft">${clean(key)}</td><td class="mono wrap-anywhere">${clean(json(value, 0))}</td></tr>`)}</tbody></table></div>`
      : html`<${Empty} title=${all.length ? "No key matches." : "This run has no config file."} />`}<//>`;
}

function Difference({ names, configs, all }) {
  const flat = configs.map((config) => flatten(config));
  const keys = [...new Set(flat.flatMap(Object.keys))].sort();
  const same = (key) => flat.every((config) => json(config[key], 0) === json(flat[0][key], 0));
  const shown = keys.filter((key) => all || !same(key));
  return html`<${Card} className="flush" title=${`${keys.filter((key) => !same(key)).length} of ${keys.length} keys differ`}
      tools=${html`<label class="toggle"><input type="checkbox" checked=${all} onChange=${(event) => setQuery({ all: event.target.checked ? "1" : null })} />Show equal keys</label>`}>
    ${shown.length ? html`<${DifferenceTable} names=${names} rows=${shown.map((key) => ({ key, values: flat.map((config) => config[key]) }))} />` : html`<${Empty} title="The configs are equal." />`}<//>`;
}

/** Keys whose values differ between runs. A key that a run does not set has its default there. */
export function DifferenceTable({ names, rows }) {
  return html`<div class="table-box"><table class="keys-table"><thead><tr><th>Key</th>${names.map((name) => html`<th key=${name}>${clean(name)}</th>`)}</tr></thead><tbody>${rows.map(({ key, values }) => html`
    <tr key=${key}><td class="mono soft">${clean(key)}</td>${values.map((value, index) => html`<td key=${index} class=${`mono wrap-anywhere ${index && json(value, 0) !== json(values[0], 0) ? "changed" : ""}`}>${value === undefined || value === null ? html`<span class="faint">default</span>` : clean(json(value, 0))}</td>`)}</tr>`)}</tbody></table></div>`;
}
