// The chains of one task side by side, aligned by turn, with the first difference to the first chain marked.
import { html } from "../lib.js";
import { runApi, useData } from "../api.js";
import { address, go, runPath, setQuery } from "../router.js";
import { Advantage, Card, Chip, Empty, Loaded, Long, OutcomeChip, Reward, Text } from "../parts.js";
import { useKeys } from "../keys.js";
import { clean, count, json, num, signed } from "../format.js";

const COLUMNS = 4;

export default function Group({ run, params, query }) {
  const [step, task] = params;
  const group = useData(runApi(run, "group"), { step, task, draw: query.draw, split: query.split }, { run });
  const from = Math.max(0, Number(query.from ?? 0));
  const total = group.data?.siblings.length ?? 0;
  const shift = (by) => setQuery({ from: Math.max(0, Math.min(total - 1, from + by)) || null });
  useKeys({ "[": () => shift(-1), "]": () => from + COLUMNS < total && shift(1), Escape: () => go(runPath(run, "steps", step)) });
  return html`<header class="page-head"><div>
      <nav class="crumbs"><a href=${runPath(run, "steps", step)}>step ${clean(step)}</a><span>group</span></nav><h1>${clean(task)}</h1>
      ${total > 0 && html`<p class="sub">${count(total, "chain")}${total > COLUMNS ? `, shown are ${from + 1} to ${Math.min(total, from + COLUMNS)}` : ""}</p>`}</div>
    ${total > COLUMNS && html`<div class="tools"><button class="button" disabled=${from === 0} onClick=${() => shift(-COLUMNS)} title="Chains before ([)">‹ Before</button>
      <button class="button" disabled=${from + COLUMNS >= total} onClick=${() => shift(COLUMNS)} title="Next chains (])">Next ›</button></div>`}</header>
    <${Loaded} from=${group} rows=${8}>${(data) => (data.siblings.length ? html`<${Body} run=${run} data=${data} from=${from} />` : html`<${Card}><${Empty} title="No chain of this task in this step." /><//>`)}<//>`;
}

function Body({ run, data, from }) {
  const { siblings, turns, differences } = data;
  const shown = siblings.map((row, index) => index).slice(from, from + COLUMNS);
  const reach = Math.max(1e-9, ...siblings.map((row) => Math.abs(row.advantage ?? 0)));
  const teaches = siblings.some((row) => row.advantage) || new Set(siblings.map((row) => row.score)).size > 1;
  return html`<div class="stack-y">
    ${data.task && html`<${Card} title="Task"><${Long} text=${data.task.messages.filter((message) => message.role !== "system").map((message) => message.content).join("\n\n")} limit=${900} />
      ${Object.keys(data.task.fields ?? {}).length > 0 && html`<div class="chips top-gap">${Object.entries(data.task.fields).slice(0, 12).map(([name, value]) => html`<${Chip} key=${name} label=${clean(name)}>${clean(json(value, 0)).slice(0, 80)}<//>`)}</div>`}<//>`}
    <${Card} title="Rewards and advantages" tools=${!teaches && html`<${Chip} kind="warn" title="All rewards are equal, so every advantage is 0.">teaches nothing<//>`}>
      <div class="advantages">${siblings.map((row, index) => html`<a key=${row.id} class=${`adv ${shown.includes(index) ? "" : "dim"}`} href=${runPath(run, "chain", row.id)} title=${`Chain ${row.chain}: reward ${num(row.score, 3)}, advantage ${signed(row.advantage)}`}>
        <span class="adv-up">${row.advantage > 0 && html`<i style=${{ height: `${(row.advantage / reach) * 100}%` }}></i>`}</span>
        <span class="adv-down">${row.advantage < 0 && html`<i style=${{ height: `${(-row.advantage / reach) * 100}%` }}></i>`}</span><span class="faint tnum">${row.chain}</span></a>`)}</div><//>
    ${data.note && html`<p class="hint">${clean(data.note)}</p>`}
    <div class="side-by-side" style=${{ "--columns": shown.length }}>
      ${shown.map((index) => html`<div key=${`h${index}`} class="sibling-head"><div class="sibling-title"><a class="strong" href=${runPath(run, "chain", siblings[index].id)}>Chain ${siblings[index].chain}</a><${OutcomeChip} outcome=${siblings[index].outcome} /></div>
        <div class="sibling-facts"><${Reward} value=${siblings[index].score} /><span><span class="faint">advantage</span> <${Advantage} value=${siblings[index].advantage} /></span><span class="tnum"><span class="faint">tokens</span> ${num(siblings[index].num_tokens)}</span></div>
        <p class="note">${where(differences[index], index)}</p></div>`)}
      ${turns.map((row, number) => shown.map((index) => html`<${Cell} key=${`${number}/${index}`} turn=${row[index]} number=${number} difference=${differences[index]} first=${index === 0} />`))}
    </div></div>`;
}

/** Where a chain leaves the first one, in words. */
function where(difference, index) {
  if (index === 0) return "The others are compared with this chain.";
  if (!difference) return "Equal to the first chain.";
  const piece = difference.pieces?.[1] ?? difference.pieces?.[0];
  const shown = piece === null || piece === undefined ? "" : ` (${JSON.stringify(clean(piece))})`;
  return `Differs from turn ${difference.turn + 1}, ${difference.part} token ${num((difference.token ?? 0) + 1)}${shown}.`;
}

function Cell({ turn, number, difference, first }) {
  if (!turn) return html`<div class="cell none"></div>`;
  const here = !first && difference?.turn === number;
  const char = here && difference.part === "reply" && difference.char !== null ? difference.char : null;
  return html`<div class=${`cell ${here ? "differs" : ""} ${!first && difference && number < difference.turn ? "same" : ""}`}>
    <header class="faint tnum">turn ${number + 1}${turn.reward ? ` · reward ${signed(turn.reward)}` : ""}${here && difference.part === "context" ? " · what came back differs" : ""}</header>
    <div class="prose">${char === null ? html`<${Text}>${turn.text}<//>` : html`<${Marked} text=${turn.text} at=${char} />`}</div>
    ${turn.results.map((result, index) => html`<div key=${index} class="cell-result mono"><span class="strong">${clean(turn.calls[index]?.name)}</span> → <${Text}>${result.observation.slice(0, 400)}<//></div>`)}</div>`;
}

/** A text whose first difference is marked: what is equal is dimmed. */
function Marked({ text, at }) {
  const end = /^\S*\s?/.exec(text.slice(at))[0].length || 1;
  return html`<span class="equal"><${Text}>${text.slice(0, at)}<//></span><mark><${Text}>${text.slice(at, at + end) || "∎"}<//></mark><${Text}>${text.slice(at + end)}<//>`;
}
