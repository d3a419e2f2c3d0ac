// The time of a chain as bars: waiting for an environment, generation, tools, scoring.
import { html } from "./lib.js";
import { Card, Legend, Stat } from "./parts.js";
import { clean, seconds, when } from "./format.js";

/** The parts of a chain's time in order: [{label, kind, start, length, turn}]. Turns without a start follow each other. */
export function spans(chain) {
  const { waited_s: waited = 0, scored_s: scored = 0, seconds: total } = chain.times;
  const found = [];
  let at = 0;
  const add = (label, kind, start, length, turn) => {
    if (length > 0) found.push({ label, kind, start, length, turn });
    at = Math.max(at, start + length);
  };
  add("waiting for an environment", "wait", 0, waited ?? 0);
  for (const turn of chain.turns) {
    const begin = turn.began_s > 0 ? turn.began_s : at;
    add(`turn ${turn.turn + 1}: generation`, "gen", begin, turn.generate_s ?? 0, turn.turn);
    add(`turn ${turn.turn + 1}: ${turn.calls.map((call) => clean(call.name)).join(", ") || "tools"}`, "tool", begin + (turn.generate_s ?? 0), turn.tools_s ?? 0, turn.turn);
  }
  if (scored) add("scoring", "score", Math.max(at, (total ?? 0) - scored), scored);
  return found;
}

export function Times({ chain }) {
  const parts = spans(chain);
  const total = Math.max(chain.times.seconds ?? 0, ...parts.map((part) => part.start + part.length), 1e-9);
  const sum = (kind) => parts.filter((part) => part.kind === kind).reduce((all, part) => all + part.length, 0);
  if (!parts.length) return html`<p class="note top-gap">This run recorded no times of its turns.</p>`;
  return html`<div class="stack-y top-gap"><${Card}><div class="stats">
      <${Stat} label="Whole chain" value=${seconds(chain.times.seconds)} note=${when(chain.times.started)} /><${Stat} label="Generation" value=${seconds(sum("gen"))} />
      <${Stat} label="Tools" value=${seconds(sum("tool"))} /><${Stat} label="Waiting" value=${seconds(sum("wait"))} note="for an environment" /><${Stat} label="Scoring" value=${seconds(sum("score"))} /></div><//>
    <${Card} title="Over time"><div class="waterfall">${parts.map((part, index) => html`<div key=${index} class="fall-row"><span class="ellipsis">${part.label}</span>
        <span class="fall-track"><i class=${`t-${part.kind}`} style=${{ left: `${(part.start / total) * 100}%`, width: `${Math.max(0.3, (part.length / total) * 100)}%` }}></i></span><span class="n tnum">${seconds(part.length)}</span></div>`)}</div>
      <${Legend} items=${[["t-wait", "waiting"], ["t-gen", "generation"], ["t-tool", "tools"], ["t-score", "scoring"]]} /><//></div>`;
}
