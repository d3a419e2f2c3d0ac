// One step: its rewards, its groups and which of them teach nothing, and when its chains generated, called tools and waited.
import { html, useMemo } from "../lib.js";
import { runApi, useData } from "../api.js";
import { address, go, runPath, setQuery } from "../router.js";
import { Card, Chip, Empty, Legend, Loaded, Reward, Stat } from "../parts.js";
import { Histogram } from "../bars.js";
import { VirtualList } from "../list.js";
import { useKeys } from "../keys.js";
import { clean, num, percent, seconds, words } from "../format.js";

export default function Step({ run, params, query }) {
  const steps = useData(runApi(run, "steps"), {}, { run });
  const all = steps.data?.steps ?? [];
  const numbers = [...new Set(all.map((each) => each.step))].sort((a, b) => a - b);
  const latest = params[0] === undefined || params[0] === "latest";
  const step = latest ? numbers.at(-1) : Number(params[0]);
  const split = query.split ?? (all.some((each) => each.step === step && each.split === "train") ? "train" : all.find((each) => each.step === step)?.split ?? "train");
  const place = numbers.indexOf(step);
  const move = (by) => numbers[place + by] !== undefined && go(runPath(run, "steps", numbers[place + by]));
  useKeys({ ",": () => move(-1), ".": () => move(1), Enter: () => go(address(runPath(run, "chains"), { step, split })) });
  if (!steps.data || step === undefined)
    return html`<header class="page-head"><h1>Steps</h1></header><${Card}><${Loaded} from=${steps}>${() => html`<${Empty} title="No step yet.">The first chains appear here when they end.<//>`}<//><//>`;
  const row = all.find((each) => each.step === step && each.split === split);
  const splits = all.filter((each) => each.step === step).map((each) => each.split);
  return html`<header class="page-head"><div><h1>Step ${num(step)}</h1>
      <p class="sub">${latest ? "The newest step. " : ""}${row && !row.whole && row.phase ? `In progress: ${words(row.phase)}.` : row?.ended && row?.started ? `Took ${seconds(row.ended - row.started)}.` : ""}</p></div>
    <div class="tools">
      ${splits.length > 1 && html`<div class="choice" role="group" aria-label="Split">${splits.map((each) => html`<button key=${each} aria-pressed=${each === split} onClick=${() => setQuery({ split: each })}>${clean(each)}</button>`)}</div>`}
      <button class="button" disabled=${place <= 0} title="Step before (,)" onClick=${() => move(-1)}>‹ Before</button>
      <label class="field inline"><span class="hidden-label">Step</span><select aria-label="Step" value=${step} onChange=${(event) => go(runPath(run, "steps", event.target.value))}>
        ${numbers.map((each) => html`<option key=${each} value=${each} selected=${each === step}>${each}</option>`)}</select></label>
      <button class="button" disabled=${place < 0 || place >= numbers.length - 1} title="Next step (.)" onClick=${() => move(1)}>Next ›</button>
      <a class="button primary" href=${address(runPath(run, "chains"), { step, split })}>Chains of this step</a>
    </div></header>
    ${row ? html`<${Body} run=${run} step=${step} split=${split} row=${row} />` : html`<${Card}><${Empty} title=${`Step ${step} has no chains.`} /><//>`}`;
}

function Body({ run, step, split, row }) {
  const histogram = useData(runApi(run, "histogram"), { step, split, bins: 24 }, { run });
  const groups = useData(runApi(run, "groups"), { step, split }, { run });
  const chains = useData(runApi(run, "chains"), { step, split, sort: "added", limit: 400 }, { run });
  const open = (low, high, last) => low !== null && go(address(runPath(run, "chains"), { step, split, low, [last ? "high" : "below"]: high }));
  return html`<div class="stack-y">
    <${Card}><div class="stats">
      <${Stat} label="Chains" value=${num(row.chains)} note=${`${num(row.scored)} with a reward`} />
      <${Stat} label="Reward" value=${num(row.mean, 3)} note="mean" />
      <${Stat} label="Median reward" value=${num(row.quantiles?.[3], 3)} note=${row.quantiles?.length ? `${num(row.quantiles[1], 3)} to ${num(row.quantiles[5], 3)} (10 – 90 %)` : ""} />
      <${Stat} label="Finished" value=${percent((row.outcomes.finished ?? 0) / row.chains)} note="of all chains" />
      <${Loaded} from=${groups} rows=${1}>${(all) => html`<${Teaching} groups=${all} />`}<//>
    </div><div class="chips top-gap">${Object.entries(row.outcomes).map(([name, count]) => html`<a key=${name} href=${address(runPath(run, "chains"), { step, split, outcome: name })}><${Chip} label=${words(clean(name))}>${num(count)}<//></a>`)}</div><//>
    <div class="grid two">
      <${Card} title="Rewards" note="Click a bar to see its chains."><${Loaded} from=${histogram} rows=${3}>${(data) => html`<${Histogram} data=${data} onPick=${open} />`}<//><//>
      <${Card} title="When chains ran" note="Each line is a chain, from its start to its end."><${Loaded} from=${chains} rows=${3}>${(data) => html`<${Lanes} run=${run} rows=${data.rows} />`}<//><//>
    </div>
    <${Card} title="Groups" note="A group whose rewards are all equal gives no advantage: it teaches nothing." className="flush">
      <${Loaded} from=${groups}>${(all) => html`<${Groups} run=${run} split=${split} groups=${all} />`}<//><//>
  </div>`;
}

function Teaching({ groups }) {
  const empty = groups.filter((group) => !group.teaches).length;
  return html`<${Stat} label="Teach nothing" value=${num(empty)} kind=${groups.length && empty > groups.length / 2 ? "warn" : ""} note=${`of ${num(groups.length)} groups`} />`;
}

function Groups({ run, split, groups }) {
  if (!groups.length) return html`<${Empty} title="No groups in this step." />`;
  const high = Math.max(1e-9, ...groups.map((group) => group.high ?? group.mean ?? 0));
  const row = (index) => {
    const group = groups[index];
    return html`<a class="group-row" href=${address(runPath(run, "group", group.step ?? "", group.task_id), { draw: group.draw || null, split: split === "train" ? null : split })}>
      <span class="ellipsis strong">${clean(group.task_id)}${group.draw ? ` · draw ${group.draw}` : ""}</span>
      <span class="n tnum">${num(group.chains)}<span class="faint wide-only"> chains</span></span>
      <span><${Reward} value=${group.mean} high=${high} /></span>
      <span class="n tnum wide-only" title="Standard deviation of the rewards">± ${num(group.spread, 3)}</span>
      <span>${group.teaches ? html`<${Chip} kind="good">teaches<//>` : html`<${Chip} kind="warn" title="All rewards of the group are equal, so every advantage is 0.">teaches nothing<//>`}</span></a>`;
  };
  return html`<${VirtualList} total=${groups.length} height=${42} row=${row} label="Groups" className=${`group-list ${groups.length > 10 ? "" : `rows-${groups.length}`}`} />`;
}

/** Bars of chains over the time of the step: generation, tools and waiting as shares of each bar. */
function Lanes({ run, rows }) {
  const timed = useMemo(() => rows.filter((row) => row.started).sort((a, b) => a.started - b.started), [rows]);
  if (!timed.length) return html`<p class="note">This run recorded no times of its chains.</p>`;
  const start = timed[0].started;
  const total = Math.max(1e-6, ...timed.map((row) => row.started + row.seconds - start));
  const line = (index) => {
    const row = timed[index];
    const parts = [["wait", row.wait_s], ["gen", row.generate_s], ["tool", row.tool_s]].map(([kind, value]) => [kind, value ?? 0]);
    const rest = Math.max(0, row.seconds - parts.reduce((sum, [, value]) => sum + value, 0));
    return html`<a class="lane" href=${runPath(run, "chain", row.id)} title=${`${clean(row.task_id)} · chain ${row.chain}: ${seconds(row.seconds)}, generation ${seconds(row.generate_s)}, tools ${seconds(row.tool_s)}, waiting ${seconds(row.wait_s)}`}>
      <i class="lane-bar" style=${{ left: `${((row.started - start) / total) * 100}%`, width: `${Math.max(0.4, (row.seconds / total) * 100)}%` }}>
        ${[...parts, ["rest", rest]].map(([kind, value]) => value > 0 && html`<b key=${kind} class=${`t-${kind}`} style=${{ flexGrow: value }}></b>`)}</i></a>`;
  };
  return html`<${VirtualList} total=${timed.length} height=${9} row=${line} label="Chains over time" className="lanes" />
    <div class="bar-axis tnum"><span>0 s</span><span>${seconds(total)}</span></div>
    <${Legend} items=${[["t-wait", "waiting"], ["t-gen", "generation"], ["t-tool", "tools"], ["t-rest", "other"]]} />`;
}
