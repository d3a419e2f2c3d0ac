// The rows of the list of chains, page by page, from any place in it.
import { useRef, useState } from "./lib.js";
import { get, newsOf, runApi, useLive } from "./api.js";

const PAGE = 100;

/** The rows of a filter in an order. `start`: {} (the beginning), {offset} or {at: id of a chain}. `list` holds the loaded rows, the
 * first of which is row `first` of all (from 0); `above` of them were loaded by `earlier()`, before the one that was asked for.
 * New rows of a running step are shown if the list is at its beginning. */
export function useRows(run, filter, sort, start) {
  const scope = JSON.stringify([run, filter]);
  const key = JSON.stringify([run, filter, sort, start]);
  const fresh = { key, scope, list: [], first: 0, above: 0, next: null, total: null, exact: true, done: false, error: null };
  const [state, setState] = useState(fresh);
  const busy = useRef(null);
  const newest = useRef(key);
  newest.current = key;
  const [again, setAgain] = useState(0);
  const ask = (params, abort) => get(runApi(run, "chains"), { ...filter, sort, limit: PAGE, count: 0, ...params }, abort);
  const load = async (cursor, abort) => {
    const answer = await ask(cursor ? { cursor } : start, abort);
    if (newest.current !== key || abort?.aborted) return;
    const ends = !answer.next && (answer.rows.length > 0 || cursor || !answer.first); // the number of all rows is known
    setState((before) => {
      const kept = cursor ? before : { ...fresh, first: answer.first };
      const list = [...kept.list, ...answer.rows];
      const [total, exact] = ends ? [kept.first + list.length, true] : before.scope === scope ? [before.total, before.exact] : [null, true];
      return { ...kept, list, next: answer.next, total, exact, done: !answer.next, error: null };
    });
    // Counting may take longer than the first rows, so it comes after them.
    if (cursor || ends) return;
    const counted = await get(runApi(run, "chains"), { ...filter, limit: 1 }, abort);
    if (newest.current === key && !abort?.aborted) setState((before) => ({ ...before, total: counted.total, exact: counted.exact }));
  };
  useLive(key, `${newsOf(run)}/${again}`, async (abort) => {
    // A list that the reader has scrolled through is not thrown away by news.
    if (state.key === key && !state.error && (state.list.length > PAGE || state.first > 0 || state.above > 0)) return;
    await load(null, abort).catch((error) => !abort.aborted && setState({ ...fresh, error }));
  });
  /** One request at a time for a list. One of another list, whose answer is dropped, does not hold it up. */
  const page = (request) => {
    if (busy.current === key || state.key !== key || state.error) return;
    busy.current = key;
    request().catch((error) => newest.current === key && setState((before) => ({ ...before, error }))).finally(() => busy.current === key && (busy.current = null));
  };
  const more = () => state.next && page(() => load(state.next));
  const earlier = () => state.first > 0 && state.list.length > 0 && page(async () => {
    const offset = Math.max(0, state.first - PAGE);
    const answer = await ask({ offset, limit: state.first - offset });
    if (newest.current !== key) return;
    setState((before) => {
      // Rows move down while a run adds chains: those that are in the list already are dropped.
      const known = new Set(before.list.map((row) => row.key));
      const rows = answer.rows.filter((row) => !known.has(row.key));
      return { ...before, list: [...rows, ...before.list], above: before.above + rows.length, first: rows.length ? before.first - rows.length : 0 };
    });
  });
  return { ...state, current: state.key === key, more, earlier, reload: () => setAgain(again + 1) };
}
