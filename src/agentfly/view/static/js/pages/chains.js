// All chains of a run: filters, a histogram whose bars filter, and a list that loads as one scrolls.
import { html, signal, useEffect, useRef, useState } from "../lib.js";
import { apiUrl, runApi, useData } from "../api.js";
import { address, go, runPath, setQuery } from "../router.js";
import { Advantage, Card, Chip, Empty, Failure, OutcomeChip, Reward, Select } from "../parts.js";
import { Histogram } from "../bars.js";
import { VirtualList } from "../list.js";
import { useRows } from "../rows.js";
import { useKeys } from "../keys.js";
import { clean, count, cut, num, seconds, words } from "../format.js";

export const FILTERS = ["step", "split", "task", "outcome", "tool", "low", "high", "below", "q", "in", "min_tokens", "max_tokens", "draw", "trained", "failed"];
const NEAR = 60; // rows from an end of what is loaded at which more is asked for
const SORTS = [
  ["-added", "newest"], ["added", "oldest"], ["-reward", "highest reward"], ["reward", "lowest reward"], ["-advantage", "highest advantage"],
  ["advantage", "lowest advantage"], ["-tokens", "most tokens"], ["-turns", "most turns"], ["-seconds", "slowest"], ["-calls", "most calls"],
];

/** Changes the filter or the order. The place in the list before means nothing in the new one. */
const refine = (patch) => setQuery({ row: null, at: null, ...patch });

/** The filter of a query string. */
export const filterOf = (query) => Object.fromEntries(FILTERS.filter((name) => query[name]).map((name) => [name, query[name]]));

export default function Chains({ run, about, query }) {
  const filter = filterOf(query);
  const sort = query.sort ?? "-added";
  const start = query.at ? { at: query.at } : Number(query.row) > 1 ? { offset: Number(query.row) - 1 } : {};
  const rows = useRows(run, filter, sort, start);
  const { low, high, below, ...rest } = filter;
  const whole = Boolean(filter.in && filter.q); // reading every chain takes too long for a histogram
  const histogram = useData(whole ? null : runApi(run, "histogram"), { ...rest, bins: 40 }, { run });
  const place = JSON.stringify([filter, sort, start]);
  const jumped = Object.keys(start).length > 0;
  // Counted from the first row that was loaded, so that rows which are loaded above it do not move the cursor.
  const [chosen, setChosen] = useState(null);
  useEffect(() => setChosen(jumped ? 0 : null), [place]);
  const cursor = chosen === null ? null : chosen + rows.above;
  const setCursor = (index) => setChosen(Math.max(0, Math.min(rows.list.length - 1, index)) - rows.above);
  const open = (index) => rows.list[index] && go(chainPath(run, rows.list[index], query));
  const total = Object.keys(filter).length || about.chains === undefined ? rows : { total: Math.max(about.chains, rows.total ?? 0), exact: true };
  const jump = (row) => setQuery({ at: null, row: row > 1 ? row : null });
  useKeys({
    j: () => setCursor((cursor ?? -1) + 1), k: () => setCursor((cursor ?? 1) - 1), Enter: () => cursor !== null && open(cursor),
    ",": () => query.step && refine({ step: Math.max(0, Number(query.step) - 1) }), ".": () => query.step && refine({ step: Number(query.step) + 1 }),
    g: () => document.getElementById("row")?.focus(), G: () => !query.in && total.exact && total.total && jump(total.total),
  });
  const top = useRef(null);
  top.current ??= signal(0);
  const seen = useRef([0, 0]);
  const fill = () => {
    if (seen.current[0] < NEAR / 3) rows.earlier();
    if (seen.current[1] > rows.list.length - NEAR) rows.more();
  };
  useEffect(fill, [rows.list]);
  // A row is drawn once: Preact skips a node that it has seen, so a count or a histogram that arrives later costs no row.
  const kept = useRef(new WeakMap());
  const drawn = (row, chosen) => {
    if (chosen) return html`<${Row} run=${run} row=${row} query=${query} chosen />`;
    if (!kept.current.has(row)) kept.current.set(row, html`<${Row} run=${run} row=${row} query=${query} />`);
    return kept.current.get(row);
  };
  const pick = (from, to, last) => refine(from === null ? { low: null, high: null, below: null } : { low: from, high: last ? to : null, below: last ? null : to });
  return html`<header class="page-head"><div><h1>Chains</h1><p class="sub tnum" aria-live="polite">${total.total === null ? " " : `${total.exact ? "" : "more than "}${count(total.total, "chain")}`}${Object.keys(filter).length ? " match the filter" : ""}</p></div>
      <div class="tools bottom">${!query.in && html`<${Jump} top=${top.current} first=${rows.first} total=${total} onRow=${jump} />`}<${Select} label="Sort" value=${sort} options=${query.in === "body" ? SORTS.slice(0, 2) : SORTS} onPick=${(next) => refine({ sort: next === "-added" ? null : next })} />
        ${Object.keys(filter).length > 0 && html`<a class="button" href=${runPath(run, "chains")}>Clear filter</a>`}
        <a class="button" href=${apiUrl(runApi(run, "export"), { ...filter, format: "jsonl" })} download>Export JSONL</a></div></header>
    <${Filters} about=${about} query=${query} />
    <div class="stack-y">
      <${Card} className="histogram-card">${whole ? html`<p class="note">A search in whole chains has no histogram.</p>` : histogram.error ? html`<${Failure} error=${histogram.error} />` : histogram.data ? html`<${Histogram} data=${histogram.data} low=${number(low)} high=${number(high ?? below)} onPick=${pick} />` : html`<div class="histogram-space"></div>`}<//>
      <${Card} className="flush chain-card">
        ${rows.error ? html`<${Failure} error=${rows.error} retry=${rows.reload} />` : rows.list.length === 0 && rows.done && rows.first ? html`<${Empty} title=${`There is no row ${num(rows.first + 1)}.`}>${total.total === null ? "" : `The list has ${total.exact ? "" : "more than "}${count(total.total, "row")}.`}<//>`
          : rows.list.length === 0 && rows.done ? html`<${Empty} title="No chain matches.">${Object.keys(filter).length ? "Loosen or clear the filter." : "Chains appear here as they end."}<//>`
          : html`<div class="chain-row chain-head" aria-hidden="true"><span>Task</span><span class="wide-only n">Step</span><span>Outcome</span><span>Reward</span><span class="n wide-only">Advantage</span><span class="wide-only">Prediction</span><span class="n wide-only">Turns</span><span class="n wide-only">Tokens</span><span class="n wide-only">Time</span></div>
            <${VirtualList} total=${rows.list.length} height=${44} cursor=${rows.current ? cursor : null} reset=${rows.key} above=${rows.above} label="Chains" className="chain-list"
              row=${(index) => drawn(rows.list[index], index === cursor)}
              onRange=${(first, last, row) => {
                seen.current = [first, last];
                top.current.value = row;
                fill();
              }} />`}<//>
    </div>`;
}

/** Where one is in the list, and how one gets to another row: by its number, or by the id of its chain. */
function Jump({ top, first, total, onRow }) {
  const [text, setText] = useState(null); // what is typed; null: the row at the top is shown
  const leave = (event) => {
    const given = event.target.value.trim();
    setText(null);
    const digits = given.replace(/[\s,.'’]/g, "");
    if (!/^\d+$/.test(digits)) return given && setQuery({ at: given, row: null });
    const row = Math.max(1, Number(digits));
    onRow(total.exact && total.total ? Math.min(row, total.total) : row);
  };
  return html`<label class="field jump"><span>Row${total.total === null ? "" : html` of <span class="tnum">${total.exact ? "" : "more than "}${num(total.total)}</span>`}</span>
    <input type="text" id="row" class="w-task" title="A number, or the id of a chain (g)" aria-label="Row number or chain id" value=${text ?? num(first + top.value + 1)}
      onFocus=${(event) => (setText(event.target.value), event.target.select())} onInput=${(event) => setText(event.target.value)} onBlur=${() => setText(null)} onChange=${leave} /></label>`;
}

const number = (text) => (text === undefined ? null : Number(text));

/** The address of a chain, with the filter it was found by, so that siblings and Esc lead back. */
export const chainPath = (run, row, query = {}) => address(runPath(run, "chain", row.id), { tab: query.tab });

function Row({ run, row, query, chosen }) {
  return html`<a class=${`chain-row ${chosen ? "chosen" : ""}`} href=${chainPath(run, row, query)} aria-current=${chosen ? "true" : undefined}>
    <span class="ellipsis"><span class="strong">${clean(row.task_id)}</span><span class="faint"> · ${row.chain}${row.split === "train" ? "" : ` · ${clean(row.split)}`}</span></span>
    <span class="wide-only n tnum">${num(row.step)}</span><span><${OutcomeChip} outcome=${row.outcome} /></span>
    <span><${Reward} value=${row.score ?? row.reward} /></span><span class="n wide-only"><${Advantage} value=${row.advantage} /></span>
    <span class="ellipsis faint wide-only" title=${row.error ? clean(cut(row.error, 300)) : undefined}>${row.error ? html`<span class="bad-text">${clean(cut(row.error, 120))}</span>` : clean(cut(row.prediction, 120)).replaceAll("\n", " ")}</span>
    <span class="n tnum wide-only">${num(row.num_turns)}</span><span class="n tnum wide-only">${num(row.num_tokens)}</span><span class="n tnum wide-only">${seconds(row.seconds)}</span></a>`;
}

function Filters({ about, query }) {
  const [text, setText] = useState(query.q ?? "");
  const timer = useRef(null);
  useEffect(() => setText(query.q ?? ""), [query.q]);
  const type = (value) => {
    setText(value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => refine({ q: value || null }), 60);
  };
  const choices = (values, any) => [["", any], ...(values ?? []).map((value) => [value, words(value)])];
  const box = (name, label, width) => html`<label class="field"><span>${label}</span><input type="text" class=${width} inputmode=${name === "task" ? undefined : "decimal"} value=${query[name] ?? ""} onChange=${(event) => refine({ [name]: event.target.value.trim() || null })} /></label>`;
  return html`<div class="filter-bar">
    <label class="field grow"><span>Text</span><input type="search" data-search placeholder="task, prediction or error" value=${text} onInput=${(event) => type(event.target.value)} /></label>
    <label class="toggle" title="Search all messages, calls and results, from the beginning of a word. Sorts by time."><input type="checkbox" checked=${query.in === "body"} onChange=${(event) => refine({ in: event.target.checked ? "body" : null, sort: null })} />Whole chains</label>
    ${box("step", "Step", "w-step")}
    <${Select} label="Split" value=${query.split} options=${choices(about.splits, "all")} onPick=${(split) => refine({ split })} />
    <${Select} label="Outcome" value=${query.outcome} options=${choices(about.outcomes, "all")} onPick=${(outcome) => refine({ outcome })} />
    <${Select} label="Tool" value=${query.tool} options=${[["", "all"], ...(about.tools ?? []).map((tool) => [tool, tool])]} onPick=${(tool) => refine({ tool })} />
    ${box("task", "Task", "w-task")}
    ${box("min_tokens", "Min. tokens", "w-step")}
    <div class="field"><span>Reward</span><div class="range">
      <input type="text" inputmode="decimal" class="w-num" aria-label="Reward at least" placeholder="from" value=${query.low ?? ""} onChange=${(event) => refine({ low: event.target.value.trim() || null })} />
      <span class="faint">to</span><input type="text" inputmode="decimal" class="w-num" aria-label="Reward at most" placeholder="to" value=${query.high ?? query.below ?? ""} onChange=${(event) => refine({ high: event.target.value.trim() || null, below: null })} /></div></div>
    ${query.below && html`<${Chip} kind="accent" title="A bar of the histogram does not include its upper end.">below ${num(Number(query.below), 3)}<//>`}
  </div>`;
}
