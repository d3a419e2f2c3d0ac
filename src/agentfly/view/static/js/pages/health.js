// Health: warnings in words with what to try, every invariant with its evidence, and where the time goes.
import { html } from "../lib.js";
import { runApi, useData } from "../api.js";
import { address, runPath } from "../router.js";
import { Card, Chip, Empty, Loaded, Spark, StackBar } from "../parts.js";
import { PHASES } from "../phases.js";
import { clean, num, percent, seconds, words } from "../format.js";

export default function Health({ run }) {
  const health = useData(runApi(run, "checks"), {}, { run });
  return html`<header class="page-head"><div><h1>Health</h1><p class="sub">Does it learn, do its promises hold, and where does the time go?</p></div></header>
    <${Loaded} from=${health} rows=${8}>${(data) => html`<div class="stack-y">
      <${Warnings} run=${run} warnings=${data.warnings} state=${data.state} />
      <${Card} title="Checks" note="Each invariant, its newest value and its bound. The strip shows the steps." className="flush"><${Checks} run=${run} checks=${data.checks} /><//>
      ${data.time && html`<${Time} run=${run} time=${data.time} />`}</div>`}<//>`;
}

function Warnings({ run, warnings }) {
  if (!warnings.length) return html`<${Card} className="ok-card"><div class="warning"><i class="light k-good"></i><div><h2>Nothing to worry about.</h2><p class="note">No warning sign in the newest steps.</p></div></div><//>`;
  return html`<div class="stack-y">${warnings.map((warning) => html`<${Card} key=${warning.name} className=${`warning-card ${warning.level}`}><div class="warning"><i class=${`light ${warning.level === "red" ? "k-bad" : "k-warn"}`}></i><div>
      <h2>${clean(warning.text)}</h2>
      ${warning.tips.length > 0 && html`<p class="note">What to try:</p><ul class="tips">${warning.tips.map((tip, index) => html`<li key=${index}>${clean(tip)}</li>`)}</ul>`}
      <div class="chips">${warning.evidence.map(([metric, value]) => html`<a key=${metric} href=${address(runPath(run, "metrics"), { q: metric })}><${Chip} label=${clean(metric)}>${num(value)}<//></a>`)}
        ${warning.step !== null && html`<a href=${runPath(run, "steps", warning.step)}><${Chip} label="step">${num(warning.step)}<//></a>`}</div></div></div><//>`)}</div>`;
}

function Checks({ run, checks }) {
  if (!checks.length) return html`<${Empty} title="No checks were recorded.">Runs of this version and later store each check of each step.<//>`;
  return html`<div class="table-box"><table class="checks-table"><tbody>${checks.map((check) => html`<tr key=${check.name}>
    <td><i class=${`light ${check.ok ? "k-good" : "k-bad"}`}></i><span class="hidden-label">${check.ok ? "holds" : "failed"}</span></td>
    <td><strong>${words(clean(check.name))}</strong><p class="note">${clean(check.promise ?? "")}</p></td>
    <td class="n">${check.value === null ? (check.ok ? "holds" : "failed") : num(check.value)}${check.bound === null ? "" : html`<span class="faint"> ≤ ${num(check.bound)}</span>`}</td>
    <td class="wide-only">${new Set(check.history.map((point) => point[2])).size < 2 ? "" : html`<${Spark} values=${check.history.map((point) => point[2])} width=${96} height=${22} label=${`Values of ${check.name}`} />`}</td>
    <td class="strip-cell wide-only"><div class="strip small">${check.history.slice(-60).map(([step, ok, value, bound]) => html`<a key=${step} class=${ok ? "k-good" : "k-bad"} href=${runPath(run, "steps", step)} title=${`Step ${step}: ${ok ? "holds" : "failed"}${value === null ? "" : `, ${num(value)}`}${bound === null ? "" : ` (bound ${num(bound)})`}`}></a>`)}</div></td>
    <td class="n wide-only">${check.failed ? html`<span class="bad-text">${num(check.failed)} of ${num(check.steps)} failed</span>` : html`<span class="faint">${num(check.steps)} steps</span>`}</td></tr>`)}</tbody></table></div>`;
}

const KINDS = new Map(PHASES.map(([metric, , kind]) => [metric, kind]));
const kindOf = (name, index) => KINDS.get(name) ?? KINDS.get(`time/${name}`) ?? KINDS.get(`time/${name}_s`) ?? `s${index % 8}`;

function Time({ run, time }) {
  const parts = time.parts.map((part, index) => ({ ...part, kind: kindOf(part.name, index) }));
  const kinds = new Map(parts.map((part) => [part.name, part.kind]));
  const shown = time.by_step.slice(-60);
  const longest = Math.max(1e-9, ...shown.map(([, all]) => Object.values(all).reduce((sum, value) => sum + value, 0)));
  return html`<${Card} title="Where the time goes" note=${`${seconds(time.total_s)} in ${num(time.steps)} steps${time.busy_share ? `; the device computed ${percent(time.busy_share)} of it` : ""}.`}>
    <div class="big-stack"><${StackBar} parts=${parts.map((part) => ({ name: part.label, value: part.seconds, kind: part.kind, title: `${part.label}: ${percent(part.share)}` }))} /></div>
    <div class="grid two top-gap"><dl class="breakdown">${parts.map((part) => html`<div key=${part.name} title=${clean(part.description ?? "")}><dt><i class=${`swatch ${part.kind}`}></i>${clean(part.label)}</dt><dd class="tnum">${seconds(part.seconds)}</dd><dd class="tnum faint">${percent(part.share)}</dd></div>`)}</dl>
      <div><div class="columns tall">${shown.map(([step, all]) => html`<a key=${step} class="column grow-up" href=${runPath(run, "steps", step)} title=${`Step ${step}: ${seconds(Object.values(all).reduce((sum, value) => sum + value, 0))}`}>
        <b style=${{ flexGrow: Math.max(0, 1 - Object.values(all).reduce((sum, value) => sum + value, 0) / longest) }}></b>
        ${Object.entries(all).map(([name, value]) => html`<i key=${name} class=${kinds.get(name) ?? "k-mute"} style=${{ flexGrow: value / longest }}></i>`)}</a>`)}</div>
        <p class="note">Time of each step; the highest took ${seconds(longest)}.</p></div></div>
    ${time.slowest?.length > 0 && html`<h3 class="top-gap">Slow steps</h3><ul class="tips">${time.slowest.map((slow) => html`<li key=${slow.step}><a class="inline-link" href=${runPath(run, "steps", slow.step)}>Step ${slow.step}</a> took ${seconds(slow.seconds)}, ${num(slow.times_median, 2)} times the median: ${clean(slow.reason)}</li>`)}</ul>`}<//>`;
}
