// One chain: chips that stay, and four tabs: talk, tokens, times, raw.
import { html, useEffect, useRef } from "../lib.js";
import { runApi, useData } from "../api.js";
import { address, go, place, runPath } from "../router.js";
import { Advantage, Chip, Loaded, OutcomeChip, Text } from "../parts.js";
import { useKeys } from "../keys.js";
import { clean, json, num, seconds, when } from "../format.js";
import { walk } from "../layout.js";
import { Talk } from "../talk.js";
import { Tokens } from "../tokens.js";
import { Times } from "../times.js";

const TABS = [["talk", "Talk"], ["tokens", "Tokens"], ["times", "Times"], ["raw", "Raw"]];

export default function Chain({ run, params, query }) {
  const id = params[0] ?? "";
  const chain = useData(runApi(run, `chain/${encodeURIComponent(id)}`));
  const tab = TABS.some(([name]) => name === query.tab) ? query.tab : "talk";
  const data = chain.fresh ? chain.data : null;
  const siblings = chain.data?.siblings ?? []; // of the chain before while the next is loaded
  const at = siblings.findIndex((each) => each.id === id);
  const sibling = useSiblings(run, id, siblings);
  const open = (name) => address(place.value.path, { ...query, tab: name === "talk" ? null : name });
  useKeys({
    "[": () => sibling(-1), "]": () => sibling(1),
    ...Object.fromEntries(TABS.map(([name], index) => [String(index + 1), () => go(open(name), { replace: true })])),
  });
  return html`<${Loaded} from=${{ ...chain, data: data ?? chain.data, error: chain.fresh ? chain.error : null }} rows=${8}>${(it) => html`
    <${Head} run=${run} chain=${it} siblings=${siblings} at=${at} sibling=${sibling} />
    <div class="sticky-head"><${Chips} chain=${it} />
      <nav class="tabs" aria-label="Views of the chain">${TABS.map(([name, label], index) => html`<a key=${name} href=${open(name)} title=${`Key ${index + 1}`} aria-current=${tab === name ? "page" : undefined}>${label}</a>`)}</nav></div>
    ${it.untrained && html`<p class="hint">Not trained on: <${Text}>${it.untrained}<//>.</p>`}
    ${it.summary.error && html`<p class="hint bad"><${Text}>${it.summary.error}<//></p>`}
    ${tab === "talk" && html`<${Talk} run=${run} chain=${it} />`}
    ${tab === "tokens" && html`<${Tokens} key=${it.summary.id} run=${run} id=${it.summary.id} query=${query} />`}
    ${tab === "times" && html`<${Times} chain=${it} />`}
    ${tab === "raw" && html`<pre class="raw" tabindex="0"><${Text}>${json(it)}<//></pre>`}`}<//>`;
}

/** Moves to a sibling. Keys may be pressed faster than the page is drawn or its chain is loaded, so a move starts from the chain
 * that the last one led to, and moves in a group that is not known yet are made when it is. */
function useSiblings(run, id, siblings) {
  const state = useRef({ id, ids: [], moves: [] }).current;
  if (state.id !== id) state.moves = []; // another chain was opened: the moves belong to the one before
  state.id = id;
  state.ids = siblings.map((each) => each.id);
  const move = () => {
    const next = state.moves.length ? walk(state.ids, state.id, state.moves) : null;
    if (next === null) return;
    state.moves = [];
    if (next === state.id) return;
    state.id = next;
    go(address(runPath(run, "chain", next), place.value.query), { replace: true });
  };
  useEffect(move, [siblings]);
  return (by) => {
    state.moves.push(by);
    move();
  };
}

function Head({ run, chain, siblings, at, sibling }) {
  const { summary } = chain;
  const group = address(runPath(run, "group", summary.step, summary.task_id), { draw: summary.draw || null, split: summary.split === "train" ? null : summary.split });
  return html`<header class="page-head"><div>
      <nav class="crumbs"><a href=${runPath(run, "chains")}>Chains</a><a href=${runPath(run, "steps", summary.step)}>step ${num(summary.step)}</a><a href=${group}>${clean(summary.task_id)}</a><span>chain ${summary.chain}</span></nav>
      <h1>${clean(summary.task_id)} <span class="faint">· chain ${summary.chain}</span></h1></div>
    <div class="tools">
      <button class="button" disabled=${at <= 0} title="Sibling before ([)" onClick=${() => sibling(-1)}>‹ Sibling</button>
      <button class="button" disabled=${at < 0 || at >= siblings.length - 1} title="Next sibling (])" onClick=${() => sibling(1)}>Sibling ›</button>
      <a class="button" href=${group}>Compare group</a></div></header>`;
}

function Chips({ chain }) {
  const { summary, honesty } = chain;
  const versions = summary.version_first === null ? null : summary.version_first === summary.version_last ? num(summary.version_first) : `${num(summary.version_first)} – ${num(summary.version_last)}`;
  return html`<div class="chips" aria-label="Summary of the chain">
    <${OutcomeChip} outcome=${summary.outcome} />
    <${Chip} kind=${summary.score === null ? "mute" : "accent"} label="reward" title="Final score plus the rewards of the turns">${num(summary.score, 4)}<//>
    ${Object.entries(summary.components ?? {}).map(([name, value]) => html`<${Chip} key=${name} label=${clean(name)}>${num(value, 3)}<//>`)}
    <${Chip} label="advantage"><${Advantage} value=${summary.advantage} /><//>
    ${versions && html`<${Chip} label="version">${versions}<//>`}
    <${Chip} label="turns">${num(summary.num_turns)}<//><${Chip} label="tokens" title="sampled by the model">${num(summary.num_tokens)}<//>
    ${summary.num_trained !== null && html`<${Chip} label="trained">${num(summary.num_trained)}<//>`}
    ${summary.num_invalid > 0 && html`<${Chip} kind="warn" label="invalid calls">${num(summary.num_invalid)}<//>`}
    ${honesty?.written > 0 && html`<${Chip} kind="warn" label="wrote observations" title="Replies in which the model wrote an observation or a user's turn itself">${num(honesty.written)}<//>`}
    ${honesty?.unsupported && html`<${Chip} kind="warn" label="answer" title="Nothing of it stands in the task or in an observation">without support<//>`}
    <${Chip} label="time" title=${when(summary.started)}>${seconds(summary.seconds)}<//>
    <${Chip} label="split">${clean(summary.split)}<//></div>`;
}
