// The token view: every token of a chain in one scroll, coloured. Only the visible lines are in the page.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./lib.js";
import { runApi, useData } from "./api.js";
import { setQuery } from "./router.js";
import { Card, Choice, Empty, Loaded } from "./parts.js";
import { VirtualList } from "./list.js";
import { breakLines } from "./layout.js";
import { modes, painter } from "./scales.js";
import { useKeys } from "./keys.js";
import { css, theme } from "./theme.js";
import { clean, num } from "./format.js";

const NAMES = { mask: "Mask", logprob: "Log-prob", ratio: "Ratio", entropy: "Entropy", version: "Version", advantage: "Advantage" };
const MEANING = {
  mask: "Which tokens the policy sampled and the update trained on.", logprob: "Log-prob at sampling. Strong colour: the model found the token unlikely.",
  ratio: "exp(trainer − engine): 1 where the learner and the engine agree.", entropy: "Entropy of the learner's distribution. Strong colour: undecided.",
  version: "Version of the weights that sampled the token.", advantage: "Advantage that the algorithm gave the token.",
};
const LINE = 24;

export function Tokens({ run, id, query }) {
  const tokens = useData(runApi(run, `chain/${encodeURIComponent(id)}/tokens`));
  return html`<${Loaded} from=${tokens} rows=${8}>${(data) =>
    !data.rows.length ? html`<${Empty} title="This chain has no tokens.">A chat server returns texts without token ids.<//>` : html`<${Strip} data=${data} mode=${query.colour ?? "mask"} />`}<//>`;
}

/** All rows of a chain as one: a new training row begins where history was rewritten. */
function join(rows) {
  if (rows.length === 1) return { ...rows[0], starts: [0] };
  const joined = { starts: [], turns: [] };
  let length = 0;
  for (const row of rows) {
    joined.starts.push(length);
    for (const [name, values] of Object.entries(row)) if (Array.isArray(values) && name !== "turns") joined[name] = [...(joined[name] ?? new Array(length).fill(null)), ...values];
    joined.turns.push(...row.turns.map((turn) => ({ turn: turn.turn, start: turn.start + length, sampled: turn.sampled + length, end: turn.end + length })));
    length += row.ids.length;
  }
  return joined;
}

function Strip({ data, mode }) {
  const row = useMemo(() => join(data.rows), [data]);
  const offered = useMemo(() => modes(row), [row]);
  const chosen = offered.includes(mode) ? mode : "mask";
  const scale = useMemo(() => painter(row, chosen), [row, chosen]);
  const [columns, setColumns] = useState(0);
  const [at, setAt] = useState(null);
  const [jump, setJump] = useState(null);
  const box = useRef(null);
  const pick = (colour) => setQuery({ colour: colour === "mask" ? null : colour });
  useKeys({ t: () => pick(offered[(offered.indexOf(chosen) + 1) % offered.length]) });
  useLayoutEffect(() => {
    const element = box.current;
    const measure = () => element.clientWidth && setColumns(Math.max(12, Math.floor((element.clientWidth - 78) / characterWidth())));
    const watcher = new ResizeObserver(measure);
    watcher.observe(element);
    measure();
    return () => watcher.disconnect();
  }, []);
  const lines = useMemo(() => (columns ? layout(row, columns) : []), [row, columns]);
  const hover = (event) => {
    const token = event.target.dataset?.token;
    if (token !== undefined && Number(token) !== at) setAt(Number(token));
  };
  const line = (index) => html`<div class="tline"><span class="tnumber" aria-hidden="true">${lines[index].label}</span>${lines[index].parts.map((part, place) => html`<span key=${place} class=${`tok ${scale.paint(part.token)} ${part.token === at ? "at" : ""}`} data-token=${part.token}>${part.text}</span>`)}</div>`;
  return html`<div class="tokens" ref=${box}>
    <div class="filter-bar"><div class="field"><span>Colour by</span><${Choice} label="Colour by" value=${chosen} options=${offered.map((name) => [name, NAMES[name], MEANING[name]])} onPick=${pick} /></div>
      <ul class="legend scale-legend">${scale.legend.map(([kind, label]) => html`<li key=${kind}><i class=${`swatch tok ${kind}`}></i><span class="tnum">${typeof label === "number" ? num(label, 3) : label}</span></li>`)}</ul></div>
    <p class="note">${MEANING[chosen]} ${data.note ? html`<span class="warn-text">${clean(data.note)}.</span>` : ""} ${data.rows.length > 1 ? `History was rewritten: the chain has ${data.rows.length} training rows.` : ""}</p>
    <${Map_} row=${row} scale=${scale} onJump=${(token) => setJump(lines.findIndex((each) => each.parts.some((part) => part.token >= token)))} />
    <${Card} className="flush token-card"><${Inspector} row=${row} token=${at} />
      <div onMouseOver=${hover} onClick=${hover}><${VirtualList} total=${lines.length} height=${LINE} row=${line} cursor=${jump} label="Tokens" className="token-list" /></div><//></div>`;
}

function layout(row, columns) {
  const pieces = row.pieces ?? row.ids.map((each) => `${each} `);
  const begins = new Map(row.turns.map((turn) => [turn.sampled, `turn ${turn.turn + 1}`]));
  let previous = -1;
  return breakLines(pieces.map((piece, index) => piece ?? `‹${row.ids[index]}›`), columns, clean).map((parts) => {
    const first = parts[0]?.token ?? previous;
    const last = parts.at(-1)?.token ?? previous;
    let label = "";
    for (let token = previous + 1; token <= last; token++) label = row.starts.length > 1 && row.starts.includes(token) ? `row ${row.starts.indexOf(token) + 1}` : begins.get(token) ?? label;
    previous = Math.max(previous, last, first);
    return { parts, label };
  });
}

let measured = 0;
function characterWidth() {
  if (!measured) {
    const probe = document.createElement("span");
    probe.className = "tok probe";
    probe.textContent = "0".repeat(100);
    document.body.append(probe);
    measured = probe.getBoundingClientRect().width / 100 || 8;
    probe.remove();
  }
  return measured;
}

const FIGURES = [["logprob", "log-prob"], ["trainer_logprob", "trainer log-prob"], ["entropy", "entropy"], ["advantage", "advantage"], ["version", "version"]];

function Inspector({ row, token }) {
  if (token === null || token >= row.ids.length) return html`<div class="inspector"><span class="faint">Point at a token to see its numbers.</span></div>`;
  const figures = FIGURES.filter(([name]) => row[name]?.[token] !== null && row[name]?.[token] !== undefined);
  const ratio = row.trainer_logprob?.[token] !== undefined && row.trainer_logprob?.[token] !== null && row.mask[token] ? Math.exp(row.trainer_logprob[token] - row.logprob[token]) : null;
  const trained = !row.mask[token] ? "context" : row.trained && !row.trained[token] ? "sampled, not trained" : "trained";
  return html`<div class="inspector" role="status"><code class="piece">${JSON.stringify(clean(row.pieces?.[token] ?? ""))}</code>
    <span><span class="faint">id</span> ${row.ids[token]}</span><span><span class="faint">place</span> ${num(token)}</span><span>${trained}</span>
    ${figures.map(([name, label]) => html`<span key=${name}><span class="faint">${label}</span> ${num(row[name][token])}</span>`)}
    ${ratio !== null && html`<span><span class="faint">ratio</span> ${num(ratio)}</span>`}</div>`;
}

/** The whole sequence as one line of colours. A click goes to that place. */
function Map_({ row, scale, onJump }) {
  const canvas = useRef(null);
  useEffect(() => {
    const element = canvas.current;
    const width = (element.width = Math.max(1, Math.floor(element.clientWidth)));
    const context = element.getContext("2d");
    const colours = new Map();
    const probe = document.createElement("span");
    document.body.append(probe);
    const colour = (kind) => {
      if (!colours.has(kind)) {
        probe.className = `tok ${kind}`;
        colours.set(kind, kind === "ctx" ? css("--sunken") : getComputedStyle(probe).backgroundColor);
      }
      return colours.get(kind);
    };
    const count = row.ids.length;
    for (let x = 0; x < width; x++) {
      // Where several tokens share a pixel, a sampled one is shown rather than context.
      const from = Math.floor((x / width) * count);
      const to = Math.max(from + 1, Math.floor(((x + 1) / width) * count));
      let token = from;
      for (let i = from; i < to; i++) if (row.mask[i]) { token = i; break; }
      context.fillStyle = colour(scale.paint(token));
      context.fillRect(x, 0, 1, element.height);
    }
    probe.remove();
  }, [row, scale, theme.value]);
  const click = (event) => onJump(Math.floor((event.offsetX / canvas.current.clientWidth) * row.ids.length));
  return html`<canvas class="token-map" ref=${canvas} height="16" title="The whole chain. Click to go there." onClick=${click} aria-hidden="true"></canvas>`;
}
