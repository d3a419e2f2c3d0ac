// All chains of a run: filters, a histogram whose bars filter, and a list that loads as one scrolls.
import { html, useEffect, useRef, useState } from "../lib.js";
import { apiUrl, get, newsOf, runApi, useData, useLive } from "../api.js";
import { address, go, runPath, setQuery } from "../router.js";
import { Advantage, Card, Chip, Empty, Failure, OutcomeChip, Reward, Select } from "../parts.js";
import { Histogram } from "../bars.js";
import { VirtualList } from "../list.js";
import { useKeys } from "../keys.js";
import { clean, count, cut, num, seconds, words } from "../format.js";

export const FILTERS = ["step", "split", "task", "outcome", "tool", "low", "high", "below", "q", "in", "min_tokens", "max_tokens", "draw", "trained", "failed"];
const PAGE = 100;
const SORTS = [
  ["-added", "newest"], ["added", "oldest"], ["-reward", "highest reward"], ["reward", "lowest reward"], ["-advantage", "highest advantage"],
  ["advantage", "lowest advantage"], ["-tokens", "most tokens"], ["-turns", "most turns"], ["-seconds", "slowest"], ["-calls", "most calls"],
];

/** The filter of a query string. */
export const filterOf = (query) => Object.fromEntries(FILTERS.filter((name) => query[name]).map((name) => [name, query[name]]));

export default function Chains({ run, about, query }) {
  const filter = filterOf(query);
  const sort = query.sort ?? "-added";
  const rows = useRows(run, filter, sort);
  const { low, high, below, ...rest } = filter;
  const whole = Boolean(filter.in && filter.q); // reading every chain takes too long for a histogram
  const histogram = useData(whole ? null : runApi(run, "histogram"), { ...rest, bins: 40 }, { run });
  const [cursor, setCursor] = useState(null);
  useEffect(() => setCursor(null), [JSON.stringify(filter), sort]);
  const open = (index) => rows.list[index] && go(chainPath(run, rows.list[index], query));
  useKeys({
    j: () => setCursor(Math.min((cursor ?? -1) + 1, rows.list.length - 1)), k: () => setCursor(Math.max((cursor ?? 1) - 1, 0)), Enter: () => cursor !== null && open(cursor),
    ",": () => query.step && setQuery({ step: Math.max(0, Number(query.step) - 1) }), ".": () => query.step && setQuery({ step: Number(query.step) + 1 }),
  });
  // A row is drawn once: Preact skips a node that it has seen, so a count or a histogram that arrives later costs no row.
  const kept = useRef(new WeakMap());
  const drawn = (row, chosen) => {
    if (chosen) return html`<${Row} run=${run} row=${row} query=${query} chosen />`;
    if (!kept.current.has(row)) kept.current.set(row, html`<${Row} run=${run} row=${row} query=${query} />`);
    return kept.current.get(row);
  };
  const pick = (from, to, last) => setQuery(from === null ? { low: null, high: null, below: null } : { low: from, high: last ? to : null, below: last ? null : to });
  return html`<header class="page-head"><div><h1>Chains</h1><p class="sub tnum" aria-live="polite">${rows.total === null ? " " : `${rows.exact ? "" : "more than "}${count(rows.total, "chain")}`}${Object.keys(filter).length ? " match the filter" : ""}</p></div>
      <div class="tools bottom"><${Select} label="Sort" value=${sort} options=${query.in === "body" ? SORTS.slice(0, 2) : SORTS} onPick=${(next) => setQuery({ sort: next === "-added" ? null : next })} />
        ${Object.keys(filter).length > 0 && html`<a class="button" href=${runPath(run, "chains")}>Clear filter</a>`}
        <a class="button" href=${apiUrl(runApi(run, "export"), { ...filter, format: "jsonl" })} download>Export JSONL</a></div></header>
    <${Filters} about=${about} query=${query} />
    <div class="stack-y">
      <${Card} className="histogram-card">${whole ? html`<p class="note">A search in whole chains has no histogram.</p>` : histogram.error ? html`<${Failure} error=${histogram.error} />` : histogram.data ? html`<${Histogram} data=${histogram.data} low=${number(low)} high=${number(high ?? below)} onPick=${pick} />` : html`<div class="histogram-space"></div>`}<//>
      <${Card} className="flush chain-card">
        ${rows.error ? html`<${Failure} error=${rows.error} retry=${rows.reload} />` : rows.list.length === 0 && rows.done ? html`<${Empty} title="No chain matches.">${Object.keys(filter).length ? "Loosen or clear the filter." : "Chains appear here as they end."}<//>`
          : html`<div class="chain-row chain-head" aria-hidden="true"><span>Task</span><span class="wide-only n">Step</span><span>Outcome</span><span>Reward</span><span class="n wide-only">Advantage</span><span class="wide-only">Prediction</span><span class="n wide-only">Turns</span><span class="n wide-only">Tokens</span><span class="n wide-only">Time</span></div>
            <${VirtualList} total=${rows.list.length} height=${44} cursor=${cursor} reset=${JSON.stringify([filter, sort])} label="Chains" className="chain-list"
              row=${(index) => drawn(rows.list[index], index === cursor)}
              onRange=${(_, last) => last > rows.list.length - 60 && rows.more()} />`}<//>
    </div>`;
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
    timer.current = setTimeout(() => setQuery({ q: value || null }), 60);
  };
  const choices = (values, any) => [["", any], ...(values ?? []).map((value) => [value, words(value)])];
  const box = (name, label, width) => html`<label class="field"><span>${label}</span><input type="text" class=${width} inputmode=${name === "task" ? undefined : "decimal"} value=${query[name] ?? ""} onChange=${(event) => setQuery({ [name]: event.target.value.trim() || null })} /></label>`;
  return html`<div class="filter-bar">
    <label class="field grow"><span>Text</span><input type="search" data-search placeholder="task, prediction or error" value=${text} onInput=${(event) => type(event.target.value)} /></label>
    <label class="toggle" title="Search all messages, calls and results. Slower; sorts by time."><input type="checkbox" checked=${query.in === "body"} onChange=${(event) => setQuery({ in: event.target.checked ? "body" : null, sort: null })} />Whole chains</label>
    ${box("step", "Step", "w-step")}
    <${Select} label="Split" value=${query.split} options=${choices(about.splits, "all")} onPick=${(split) => setQuery({ split })} />
    <${Select} label="Outcome" value=${query.outcome} options=${choices(about.outcomes, "all")} onPick=${(outcome) => setQuery({ outcome })} />
    <${Select} label="Tool" value=${query.tool} options=${[["", "all"], ...(about.tools ?? []).map((tool) => [tool, tool])]} onPick=${(tool) => setQuery({ tool })} />
    ${box("task", "Task", "w-task")}
    ${box("min_tokens", "Min. tokens", "w-step")}
    <div class="field"><span>Reward</span><div class="range">
      <input type="text" inputmode="decimal" class="w-num" aria-label="Reward at least" placeholder="from" value=${query.low ?? ""} onChange=${(event) => setQuery({ low: event.target.value.trim() || null })} />
      <span class="faint">to</span><input type="text" inputmode="decimal" class="w-num" aria-label="Reward at most" placeholder="to" value=${query.high ?? query.below ?? ""} onChange=${(event) => setQuery({ high: event.target.value.trim() || null, below: null })} /></div></div>
    ${query.below && html`<${Chip} kind="accent" title="A bar of the histogram does not include its upper end.">below ${num(Number(query.below), 3)}<//>`}
  </div>`;
}

/** The rows of a filter, page by page. New rows of a running step are shown if the list is at its beginning. */
function useRows(run, filter, sort) {
  const key = JSON.stringify([run, filter, sort]);
  const fresh = { key, list: [], next: null, total: null, exact: true, done: false, error: null };
  const [state, setState] = useState(fresh);
  const busy = useRef(false);
  const newest = useRef(key);
  newest.current = key;
  const [again, setAgain] = useState(0);
  const load = async (cursor, abort) => {
    const answer = await get(runApi(run, "chains"), { ...filter, sort, limit: PAGE, cursor, count: 0 }, abort);
    if (newest.current !== key || abort?.aborted) return;
    setState((before) => {
      const list = cursor ? [...before.list, ...answer.rows] : answer.rows;
      const counted = before.key === key || !answer.next;
      const [total, exact] = answer.next ? (counted ? [before.total, before.exact] : [null, true]) : [list.length, true];
      return { key, list, next: answer.next, total, exact, done: !answer.next, error: null };
    });
    // Counting may take longer than the first rows, so it comes after them.
    if (cursor || !answer.next) return;
    const counted = await get(runApi(run, "chains"), { ...filter, limit: 1 }, abort);
    if (newest.current === key && !abort?.aborted) setState((before) => ({ ...before, total: counted.total, exact: counted.exact }));
  };
  useLive(key, `${newsOf(run)}/${again}`, async (abort) => {
    // A list that the reader has scrolled through is not thrown away by news.
    if (state.key === key && state.list.length > PAGE) return;
    await load(null, abort).catch((error) => !abort.aborted && setState({ ...fresh, error }));
  });
  const more = () => {
    if (busy.current || !state.next || state.key !== key) return;
    busy.current = true;
    load(state.next).catch((error) => setState((before) => ({ ...before, error }))).finally(() => (busy.current = false));
  };
  return { ...state, more, reload: () => setAgain(again + 1) };
}
