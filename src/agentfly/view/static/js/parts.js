// Small building blocks of the pages. Text of models and tools is shown through text nodes only, cleaned.
import { html, useState } from "./lib.js";
import { clean, cut, num, signed, words } from "./format.js";

/** Untrusted text. */
export const Text = ({ children }) => clean(children);

/** Outcomes in their colours: finished is good, a limit is a warning, a failure of the world is bad. */
export const OUTCOME_KIND = {
  finished: "good", max_turns: "warn", max_tokens: "warn", max_time: "warn", no_tool_call: "warn", tool_error: "bad", world_failure: "bad", cancelled: "mute",
};

export const Chip = ({ kind = "", label, title, children }) => html`
  <span class=${`chip ${kind}`} title=${title}>${label && html`<span class="chip-label">${label}</span>`}<span class="chip-value">${children}</span></span>`;

export const OutcomeChip = ({ outcome }) => html`<${Chip} kind=${OUTCOME_KIND[outcome] ?? "mute"}>${words(clean(outcome))}<//>`;

/** A reward as number with a small bar, and no number where the chain has none. */
export function Reward({ value, low = 0, high = 1 }) {
  if (value === null || value === undefined) return html`<span class="faint" title="The chain has no reward.">–</span>`;
  const share = high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 0;
  const level = Math.round(share * 10);
  return html`<span class="reward"><span class=${`meter m${level}`}></span><span class="tnum">${num(value, 3)}</span></span>`;
}

export const Advantage = ({ value }) =>
  html`<span class=${`tnum ${value > 0 ? "good-text" : value < 0 ? "bad-text" : "faint"}`}>${signed(value)}</span>`;

export const STATES = {
  running: "The run is writing now.", finished: "The run reached its last step.", stopped: "The run was stopped and can be resumed.",
  dead: "The process is gone, and the run was not closed.",
};

export const StateDot = ({ state, text = true }) => html`
  <span class="state" title=${STATES[state] ?? ""}><i class=${`dot ${state}`} aria-hidden="true"></i>${text && html`<span>${state}</span>`}</span>`;

/** A message in place of a page or a card that has nothing to show. */
export const Empty = ({ title, children }) => html`
  <div class="empty" role="status"><p class="empty-title">${title}</p>${children && html`<p>${children}</p>`}</div>`;

export const Failure = ({ error, retry }) => html`
  <div class="empty failure" role="alert"><p class="empty-title">This could not be loaded.</p><p><${Text}>${error?.message ?? error}<//></p>
    ${retry && html`<button class="button" onClick=${retry}>Try again</button>`}</div>`;

export const Loading = ({ rows = 4 }) => html`
  <div class="loading" aria-busy="true" aria-label="Loading">${Array.from({ length: rows }, (_, i) => html`<div key=${i} class=${`bone b${i % 4}`}></div>`)}</div>`;

/** What a request gave: its failure, a placeholder while it is on its way, or children(data). */
export function Loaded({ from, rows, children }) {
  if (from.error && !from.data) return html`<${Failure} error=${from.error} retry=${from.reload} />`;
  if (!from.data) return html`<${Loading} rows=${rows} />`;
  return children(from.data);
}

export const Card = ({ title, note, tools, wide, className = "", children }) => html`
  <section class=${`card ${wide ? "wide" : ""} ${className}`}>
    ${(title || tools) && html`<header class="card-head"><div><h2>${title}</h2>${note && html`<p class="note">${note}</p>`}</div>
      ${tools && html`<div class="card-tools">${tools}</div>`}</header>`}
    ${children}
  </section>`;

export const Stat = ({ label, value, note, kind = "" }) => html`
  <div class="stat"><span class="stat-label">${label}</span><span class=${`stat-value ${kind}`}>${value}</span>${note && html`<span class="stat-note">${note}</span>`}</div>`;

/** A choice of a few, as buttons: [[value, label], ...]. */
export const Choice = ({ label, value, options, onPick }) => html`
  <div class="choice" role="group" aria-label=${label}>
    ${options.map(([each, name, title]) => html`<button key=${each} type="button" title=${title} aria-pressed=${each === value} onClick=${() => onPick(each)}>${name}</button>`)}
  </div>`;

export const Select = ({ label, value, options, onPick }) => html`
  <label class="field"><span>${label}</span>
    <select aria-label=${label} value=${value ?? ""} onChange=${(event) => onPick(event.target.value || null)}>
      ${options.map(([each, name]) => html`<option key=${each} value=${each} selected=${String(each) === String(value ?? "")}>${clean(name)}</option>`)}
    </select></label>`;

/** A line of at most `width` values as a small picture. */
export function Spark({ values, width = 120, height = 28, label }) {
  const points = (values ?? []).map((value, index) => [index, value]).filter(([, value]) => Number.isFinite(value));
  if (points.length < 2) return html`<svg class="spark" viewBox=${`0 0 ${width} ${height}`} width=${width} height=${height} aria-hidden="true"></svg>`;
  const low = Math.min(...points.map(([, value]) => value));
  const high = Math.max(...points.map(([, value]) => value));
  const last = points[points.length - 1][0] || 1;
  const place = ([index, value]) => [2 + (index / last) * (width - 6), height - 3 - ((high > low ? (value - low) / (high - low) : 0.5) * (height - 6))];
  const line = points.map(place).map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`);
  const [endX, endY] = place(points[points.length - 1]);
  return html`<svg class="spark" viewBox=${`0 0 ${width} ${height}`} width=${width} height=${height} role="img"
      aria-label=${label ?? `from ${num(points[0][1], 3)} to ${num(points[points.length - 1][1], 3)}`}>
    <polygon class="spark-fill" points=${`${line[0].split(",")[0]},${height} ${line.join(" ")} ${endX.toFixed(1)},${height}`} />
    <polyline class="spark-line" points=${line.join(" ")} /><circle class="spark-end" cx=${endX} cy=${endY} r="2" /></svg>`;
}

/** Parts of a whole as one bar: [{name, value, kind, title}]. */
export function StackBar({ parts, total }) {
  const sum = total ?? parts.reduce((all, part) => all + (part.value || 0), 0);
  if (!(sum > 0)) return html`<div class="stack empty-stack"></div>`;
  return html`<div class="stack">${parts.filter((part) => part.value > 0).map((part) => html`
    <i key=${part.name} class=${part.kind} style=${{ flexGrow: part.value / sum }} title=${part.title ?? part.name}></i>`)}</div>`;
}

export const Legend = ({ items }) => html`
  <ul class="legend">${items.map(([kind, name, note]) => html`<li key=${name}><i class=${`swatch ${kind}`}></i>${name}${note !== undefined && html`<span class="faint tnum">${note}</span>`}</li>`)}</ul>`;

/** A long text that is folded after some lines. */
export function Long({ text, limit = 1600, className = "" }) {
  const [open, setOpen] = useState(false);
  const long = text.length > limit;
  return html`<div class=${`prose ${className}`}><${Text}>${long && !open ? cut(text, limit) : text}<//>
    ${long && html`<button class="link-button" onClick=${() => setOpen(!open)}>${open ? "Show less" : `Show all ${num(text.length)} characters`}</button>`}</div>`;
}
