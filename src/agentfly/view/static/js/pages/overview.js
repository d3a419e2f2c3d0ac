// One run at a glance: what it does now, whether it learns, how its chains end, whether its checks hold.
import { html, useMemo } from "../lib.js";
import { runApi, useData } from "../api.js";
import { go, runPath } from "../router.js";
import { Card, Empty, Legend, Loaded, OUTCOME_KIND, StackBar, Stat, StateDot } from "../parts.js";
import { Chart } from "../chart.js";
import { align, curve } from "../curves.js";
import { seriesColour, theme } from "../theme.js";
import { clean, num, percent, seconds, words } from "../format.js";
import { PHASES, phaseParts } from "../phases.js";
import { Sources } from "../sources.js";

const NAMES = [
  "reward/mean", "rollout/success", "rollout/scored", "rollout/chains", "validation/success", "validation/success_ci_low",
  "validation/success_ci_high", "validation/scored", "validation/chains", "validation/reward", "rollout/reply_tokens", "rollout/turns", "rollout/tokens_per_s",
  "train/logprob_gap", "train/entropy", "train/zero_advantage_groups", "time/step_s", ...PHASES.map(([name]) => name),
];

export default function Overview({ run, about, query }) {
  const series = useData(runApi(run, "series"), { names: NAMES.join(",") }, { run });
  const steps = useData(runApi(run, "steps"), {}, { run });
  const checks = useData(runApi(run, "checks"), {}, { run });
  const meta = about.meta ?? {};
  const held = rows(steps.data).filter((each) => each.split === "validation").length; // a new validation is asked for anew
  return html`<header class="page-head"><div><h1>${clean(run)}</h1>
      <p class="sub">${[about.model ?? meta.model, about.world ?? meta.world, about.algorithm ?? meta.algorithm].filter(Boolean).map(clean).join(" · ")}</p></div>
      ${about.state && html`<${StateDot} state=${about.state} />`}</header>
    <div class="stack-y">
      <${Loaded} from=${series}>${(data) => html`<${Numbers} data=${data} about=${about} steps=${rows(steps.data)} />`}<//>
      ${about.state === "running" && html`<${Now} steps=${rows(steps.data)} about=${about} />`}
      <${Loaded} from=${series}>${(data) => html`<${Charts} run=${run} data=${data} />`}<//>
      <${Sources} key=${held} run=${run} validations=${held} field=${query.source} />
      <div class="grid two">
        <${Card} title="How chains end" note="Each column is a step. Click one to open it."><${Loaded} from=${steps}>${(all) => html`<${Outcomes} run=${run} steps=${rows(all)} />`}<//><//>
        <${Card} title="Where the time goes" note="The newest steps, by what the step waited for."><${Loaded} from=${series}>${(data) => html`<${Times} data=${data} />`}<//><//>
      </div>
      <${Card} title="Checks" note="Invariants of each step: green holds, red does not." tools=${html`<a class="inline-link" href=${runPath(run, "checks")}>Health</a>`}>
        <${Loaded} from=${checks} rows=${1}>${(all) => html`<${CheckStrip} run=${run} checks=${all.checks} />`}<//><//>
    </div>`;
}

const rows = (answer) => answer?.steps ?? [];
const last = (points) => (points?.length ? points[points.length - 1][2] : null);

/** Over how many chains the newest success is, with its bounds if more than 1 % have no score; else null. */
export function over(data, what) {
  const [share, scored, all] = ["success", "scored", "chains"].map((name) => last(data[`${what}/${name}`]));
  if (!(all - scored > 0.01 * all)) return null;
  const good = (share ?? 0) * scored;
  return `of ${num(scored)} scored of ${num(all)} chains; ${percent(good / all)} to ${percent((good + all - scored) / all)} of all`;
}

/** The 95 % interval of the newest validation and its number of chains. */
function interval(data) {
  const [low, high, all] = ["success_ci_low", "success_ci_high", "chains"].map((name) => last(data[`validation/${name}`]));
  if (low === null || high === null) return "";
  return ` (${percent(low)} to ${percent(high)}), ${over(data, "validation") ?? `of ${num(all)} chains`}`;
}

function Numbers({ data, about, steps }) {
  const step = about.step ?? steps.at(-1)?.step ?? null;
  const recent = (data["time/step_s"] ?? []).slice(-10).map((point) => point[2]).filter(Number.isFinite).sort((a, b) => a - b);
  const pace = recent.length ? recent[recent.length >> 1] : null;
  const held = (data["validation/success"] ?? []).map((point) => point[2]).filter(Number.isFinite);
  const left = about.total_steps && pace && about.state === "running" ? (about.total_steps - step) * pace : null;
  return html`<${Card}><div class="stats">
    <${Stat} label="Step" value=${num(step)} note=${about.total_steps ? `of ${num(about.total_steps)}` : ""} />
    <${Stat} label="Reward" value=${num(last(data["reward/mean"]), 3)} note="mean of the newest step" />
    <${Stat} label="Success" value=${percent(last(data["rollout/success"]))} note=${over(data, "rollout") ?? "of scored chains"} />
    <${Stat} label="Best validation" value=${held.length ? percent(Math.max(...held)) : "–"} note=${held.length ? `now ${percent(held.at(-1))}${interval(data)}` : "not validated yet"} />
    <${Stat} label="Chains" value=${num(about.chains ?? steps.reduce((sum, each) => sum + each.chains, 0))} note="stored" />
    <${Stat} label="Step time" value=${seconds(pace)} note=${left ? `about ${seconds(left)} left` : "median of ten"} />
  </div><//>`;
}

function Now({ steps, about }) {
  const now = steps.filter((each) => each.split === "train").at(-1);
  const live = about.live?.chains?.data;
  if (!now || now.whole) return null;
  const total = about.chains_per_step ?? null;
  return html`<${Card} title=${`Step ${num(now.step)} is in progress`} note=${now.phase ? `Now: ${words(now.phase)}` : ""}>
    <${StackBar} total=${total ?? now.chains} parts=${[{ name: "done", value: now.chains, kind: "s0", title: `${num(now.chains)} chains done` }]} />
    <p class="note tnum">${num(now.chains)}${total ? ` of ${num(total)}` : ""} chains done${Array.isArray(live) ? `, ${live.length} running` : ""}</p><//>`;
}

const CHARTS = [
  ["Reward", [["reward/mean", "train"], ["validation/reward", "validation"]]],
  ["Success", [["rollout/success", "train"], ["validation/success", "validation"]]],
  ["Reply length", [["rollout/reply_tokens", "tokens per reply"]]],
  ["Turns", [["rollout/turns", "turns per chain"]]],
  ["Entropy", [["train/entropy", "entropy"]]],
  ["Log-prob gap", [["train/logprob_gap", "engine to learner"]]],
];

function Charts({ run, data }) {
  const there = CHARTS.map(([title, lines]) => [title, lines.filter(([name]) => data[name]?.length)]).filter(([, lines]) => lines.length);
  if (!there.length) return html`<${Card}><${Empty} title="No metrics yet.">The first step has not ended.<//><//>`;
  return html`<div class="grid">${there.map(([title, lines]) => html`<${Card} key=${title} title=${title}><${Curve} run=${run} data=${data} lines=${lines} /><//>`)}</div>`;
}

function Curve({ run, data, lines }) {
  const table = useMemo(() => align(lines.map(([name]) => curve(data[name], "step"))), [data]);
  const look = useMemo(() => lines.map(([, label], index) => ({ label, colour: seriesColour(index) })), [theme.value, lines.length]);
  return html`<${Chart} data=${table} lines=${look} height=${150} onPick=${(step) => go(runPath(run, "steps", step))} />`;
}

function Outcomes({ run, steps }) {
  const train = steps.filter((each) => each.split === "train").slice(-80);
  if (!train.length) return html`<p class="note">No step yet.</p>`;
  const names = [...new Set(train.flatMap((each) => Object.keys(each.outcomes)))].sort((a, b) => order(a) - order(b));
  return html`<div class="columns">${train.map((each) => html`
      <a key=${each.step} class="column" href=${runPath(run, "steps", each.step)} title=${`Step ${each.step}: ${names.filter((name) => each.outcomes[name]).map((name) => `${each.outcomes[name]} ${words(name)}`).join(", ")}`}>
        ${names.map((name) => html`<i key=${name} class=${outcomeClass(name)} style=${{ flexGrow: (each.outcomes[name] ?? 0) / each.chains }}></i>`)}</a>`)}</div>
    <${Legend} items=${names.map((name) => [outcomeClass(name), words(clean(name)), percent((train.at(-1).outcomes[name] ?? 0) / train.at(-1).chains)])} />`;
}

const ORDER = Object.keys(OUTCOME_KIND);
const order = (name) => (ORDER.indexOf(name) + 100) % 100;
const CLASSES = { finished: "k-good", max_turns: "s2", max_tokens: "o-tokens", max_time: "s3", no_tool_call: "s6", tool_error: "k-bad", world_failure: "o-world", cancelled: "k-mute" };
const outcomeClass = (name) => CLASSES[name] ?? "k-mute";

function Times({ data }) {
  const parts = phaseParts(data, 10);
  if (!parts.length) return html`<p class="note">No step has ended yet.</p>`;
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  return html`<div class="big-stack"><${StackBar} parts=${parts} /></div>
    <dl class="breakdown">${parts.map((part) => html`<div key=${part.name}><dt><i class=${`swatch ${part.kind}`}></i>${part.name}</dt><dd class="tnum">${seconds(part.value)}</dd><dd class="tnum faint">${percent(part.value / total)}</dd></div>`)}</dl>`;
}

export function CheckStrip({ run, checks }) {
  const steps = new Map();
  for (const check of checks) {
    for (const [step, ok] of check.history) {
      const there = steps.get(step) ?? { ok: 0, bad: [] };
      if (ok) there.ok += 1;
      else there.bad.push(check.name);
      steps.set(step, there);
    }
  }
  if (!steps.size) return html`<p class="note">This run recorded no checks. Runs of this version and later do.</p>`;
  const shown = [...steps].sort(([a], [b]) => a - b).slice(-160);
  return html`<div class="strip">${shown.map(([step, { ok, bad }]) => html`<a key=${step} class=${bad.length ? "k-bad" : "k-good"} href=${runPath(run, "steps", step)}
      title=${bad.length ? `Step ${step}: ${bad.map(words).join(", ")} failed` : `Step ${step}: ${ok} checks hold`}><span class="hidden-label">${bad.length ? `step ${step} failed` : `step ${step} holds`}</span></a>`)}</div>`;
}
