// Questions to the server, and news from it.
import { effect, signal, useEffect, useRef, useState } from "./lib.js";

/** Number of the newest change of each run, by name, as the server tells it. */
export const versions = signal({});
/** Whether pages change while a run writes (key f). */
export const follow = signal(true);
/** The changes that pages show: those of now, or of the moment at which they were told to stand still. */
const shown = signal({});
effect(() => {
  if (follow.value) shown.value = versions.value;
});
/** Whether the stream of news is open. */
export const connected = signal(true);

/** Encodes a run's name for a path of the API. */
export const runApi = (run, rest = "") => `/api/runs/${encodeURIComponent(run)}${rest ? `/${rest}` : ""}`;

/** An address of the API with its parameters; empty ones are left out. */
export function apiUrl(path, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return kept.length ? `${path}?${new URLSearchParams(kept)}` : path;
}

/** The answer of a GET as a value. Throws an Error with the server's sentence. */
export async function get(path, params, abort) {
  let answer;
  try {
    answer = await fetch(apiUrl(path, params), { signal: abort, headers: { Accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The dashboard does not answer. Is `agentfly view` still running?");
  }
  return value(answer);
}

/** Sends a JSON body. Throws an Error with the server's sentence. */
export async function post(path, body, abort) {
  const answer = await fetch(path, {
    method: "POST", signal: abort, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body ?? {}),
  });
  return value(answer);
}

async function value(answer) {
  // A request that was given up while its body arrived is no empty answer: json() throws, and so does this.
  if (answer.ok) return answer.json();
  const body = await answer.json().catch(() => ({}));
  const error = new Error(body.error ?? `The server answered ${answer.status}.`);
  error.status = answer.status;
  throw error;
}

/** Calls `load(signal)` when the key changes, and again when the version does. A request that is under way is finished first: news
 * that come faster than answers would otherwise give up every answer. `load` handles its own errors. A key of null: ask nothing. */
export function useLive(key, version, load) {
  const flight = useRef(null);
  const newest = useRef(load);
  newest.current = load;
  useEffect(() => {
    const mine = { abort: new AbortController(), busy: false, again: false };
    flight.current = mine;
    return () => mine.abort.abort();
  }, [key]);
  useEffect(() => {
    const mine = flight.current;
    mine.again = mine.busy;
    if (key === null || mine.busy) return;
    const ask = async () => {
      mine.busy = true;
      do {
        mine.again = false;
        await newest.current(mine.abort.signal);
      } while (mine.again && !mine.abort.signal.aborted);
      mine.busy = false;
    };
    ask();
  }, [key, version]);
}

/** Number of the newest change of a run ("*": of any) that is shown. */
export const newsOf = (run) => (!run ? "" : run === "*" ? Object.values(shown.value).join() : shown.value[run]);

/** {data, error, loading, fresh, reload} of a GET. The data before stays while the next is fetched; `fresh` says that they belong to
 * this path and these parameters. `run`: ask again when this run has written ("*": any run). `path` null: ask nothing. */
export function useData(path, params = {}, { run = null } = {}) {
  const [state, setState] = useState({ data: null, error: null, loading: true, key: null });
  const [again, setAgain] = useState(0);
  const key = path && apiUrl(path, params);
  useLive(key, `${newsOf(run)}/${again}`, async (abort) => {
    try {
      const data = await get(path, params, abort);
      if (!abort.aborted) setState({ data, error: null, loading: false, key });
    } catch (error) {
      if (!abort.aborted) setState((before) => ({ ...before, error, loading: false, key }));
    }
  });
  return { ...state, reload: () => setAgain(again + 1), fresh: state.key === key };
}

/** Listens to the server's news. Changes of a run are told at most once in `pause` milliseconds. */
export function listen(pause = 400) {
  let pending = {};
  let timer = null;
  const source = new EventSource("/api/changes");
  const tell = () => {
    timer = null;
    versions.value = { ...versions.value, ...pending };
    pending = {};
  };
  source.onopen = () => (connected.value = true);
  source.onerror = () => (connected.value = false);
  source.onmessage = (event) => {
    const news = JSON.parse(event.data);
    if (!news.run) return;
    pending[news.run] = news.version;
    timer ??= setTimeout(tell, document.hidden ? 5000 : pause);
  };
  return source;
}
