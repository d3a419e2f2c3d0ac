// Try it: talk to a checkpoint of the run with its own agent, tools and environment, or go on from a turn of a stored chain.
import { html, useEffect, useRef, useState } from "../lib.js";
import { get, post } from "../api.js";
import { address, go, runPath, setQuery } from "../router.js";
import { Card, Chip, Empty, Failure, Select, Text } from "../parts.js";
import { Message, thinking } from "../talk.js";
import { converse } from "../stream.js";
import { sequential } from "../scales.js";
import { clean, count, json, num, percent, seconds, words } from "../format.js";

export default function Chat({ run, about, query }) {
  const [chat, setChat] = useState(null);
  const [error, setError] = useState(null);
  const [opening, setOpening] = useState(false);
  useEffect(() => {
    if (!query.session) return setChat(null) ?? undefined;
    const abort = new AbortController();
    get(`/api/chat/${encodeURIComponent(query.session)}`, {}, abort.signal).then(setChat, (failure) => failure.name !== "AbortError" && (setChat(null), setError(failure), setQuery({ session: null })));
    return () => abort.abort();
  }, [query.session]);
  const open = async (wish) => {
    setOpening(true);
    setError(null);
    try {
      const made = await post("/api/chat", { run, ...wish });
      setChat(made);
      setQuery({ session: made.session });
    } catch (failure) {
      setError(failure);
    }
    setOpening(false);
  };
  const close = async () => {
    await fetch(`/api/chat/${encodeURIComponent(chat.session)}`, { method: "DELETE" }).catch(() => null);
    go(runPath(run, "chat"));
  };
  return html`<header class="page-head"><div><h1>Try it</h1><p class="sub">${chat ? `${clean(chat.checkpoint)} · ${clean(chat.agent)}${chat.tools.length ? ` · tools: ${chat.tools.map((tool) => clean(tool.name)).join(", ")}` : ""}` : "Talk to a checkpoint of this run with its own agent, tools and environment."}</p></div>
      ${chat && html`<div class="tools"><button class="button" onClick=${close}>End conversation</button></div>`}</header>
    ${error && html`<${Card}><${Failure} error=${error} /><//>`}
    ${chat ? html`<${Conversation} key=${chat.session} run=${run} start=${chat} />` : html`<${Setup} run=${run} about=${about} query=${query} open=${open} opening=${opening} />`}`;
}

function Setup({ run, about, query, open, opening }) {
  const checkpoints = about.checkpoints ?? [];
  const [temperature, setTemperature] = useState("");
  const [checkpoint, setCheckpoint] = useState("");
  const fork = query.fork;
  const begin = () => {
    const wish = fork ? { chain: fork, turn: Number(query.turn ?? 0) } : { task: query.task };
    open({ ...wish, checkpoint: checkpoint || undefined, sampling: temperature === "" ? undefined : { temperature: Number(temperature) } });
  };
  return html`<${Card} title=${fork ? `Go on from turn ${num(Number(query.turn ?? 0) + 1)} of a stored chain` : "Start a conversation"} note=${fork ? "The tool calls before that turn are made again in a new environment." : "The model is loaded on this machine. That can take a minute."}>
    <div class="filter-bar setup">
      <${Select} label="Checkpoint" value=${checkpoint} options=${[["", checkpoints.length ? "newest" : "model before training"], ...checkpoints.map((each) => [each.name, each.name]).reverse(), ...(checkpoints.length ? [["model", "model before training"]] : [])]} onPick=${(next) => setCheckpoint(next ?? "")} />
      <label class="field"><span>Temperature</span><input type="text" inputmode="decimal" class="w-num" placeholder="config" value=${temperature} onInput=${(event) => setTemperature(event.target.value)} /></label>
      ${!fork && html`<label class="field"><span>Task of the data (optional)</span><input type="text" class="w-task" placeholder="id" value=${query.task ?? ""} onChange=${(event) => setQuery({ task: event.target.value.trim() || null })} /></label>`}
      <button class="button primary" disabled=${opening} onClick=${begin}>${opening ? "Loading the model …" : fork ? "Fork" : "Start"}</button>
      ${fork && html`<a class="button" href=${address(runPath(run, "chain", fork))}>Back to the chain</a>`}</div><//>`;
}

/** Items of a conversation: messages of the start, then what the stream brought. */
function Conversation({ run, start }) {
  const [items, setItems] = useState(() => start.messages.map((message) => ({ kind: "message", message })));
  const [live, setLive] = useState("");
  const [busy, setBusy] = useState(false);
  const [text, setText] = useState("");
  const abort = useRef(null);
  const end = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [items.length, live]);
  const add = (...more) => setItems((before) => [...before, ...more]);
  const on = (event, value) => {
    if (event === "text") setLive((before) => before + value.text);
    else if (event === "reply") {
      setLive("");
      add({ kind: "reply", reply: value });
    } else if (["call", "result", "score", "end"].includes(event)) add({ kind: event, value });
    else if (event === "error") add({ kind: "error", error: value.error });
  };
  const say = async () => {
    const said = text.trim();
    if (busy) return;
    if (said) add({ kind: "message", message: { role: "user", content: said } });
    setText("");
    setBusy(true);
    abort.current = new AbortController();
    try {
      await converse(`/api/chat/${encodeURIComponent(start.session)}`, said ? { text: said } : {}, on, abort.current.signal);
    } catch (failure) {
      add({ kind: "error", error: failure.name === "AbortError" ? "Stopped." : failure.message });
    }
    setLive((rest) => {
      if (rest) add({ kind: "message", message: { role: "assistant", content: rest } });
      return "";
    });
    setBusy(false);
  };
  const key = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      say();
    }
  };
  const waiting = Boolean(start.forked || start.task) && items.every((item) => item.kind === "message");
  return html`<div class="chat"><div class="talk" aria-live="polite">
      ${start.forked && html`<p class="note">Forked from <a class="inline-link" href=${runPath(run, "chain", start.forked.chain)}>the stored chain</a> before turn ${num(start.forked.turn + 1)}.</p>`}
      ${(start.differences ?? []).map((sentence, index) => html`<p key=${index} class="hint">${clean(sentence)}</p>`)}
      ${!items.length && !live && html`<${Empty} title="Say something.">The agent answers with its own prompt and tools.<//>`}
      ${items.map((item, index) => html`<${Item} key=${index} item=${item} />`)}
      ${live && html`<article class="message assistant"><header><span class="role">Assistant</span><span class="faint">writing</span></header><div class="live-tokens"><${Text}>${thinking(live).thought && !thinking(live).rest ? thinking(live).thought : live}<//><i class="caret"></i></div></article>`}
      <span class="chat-end" ref=${end}></span></div>
    <div class="composer"><textarea rows="1" data-search aria-label="Message" placeholder=${waiting ? "Empty: the agent goes on from here" : "Message"} maxlength=${start.limits?.max_text} value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${key}></textarea>
      ${busy ? html`<button class="button" onClick=${() => abort.current?.abort()}>Stop</button>` : html`<button class="button primary" disabled=${!text.trim() && !waiting} onClick=${say}>${text.trim() || !waiting ? "Send" : "Go on"}</button>`}</div></div>`;
}

function Item({ item }) {
  if (item.kind === "message") return html`<${Message} message=${item.message} />`;
  if (item.kind === "reply") return html`<${Reply} reply=${item.reply} />`;
  if (item.kind === "error") return html`<p class="hint bad"><${Text}>${item.error}<//></p>`;
  const { value } = item;
  if (item.kind === "call") return html`<div class="call"><p class="call-line"><span class="mono strong">${clean(value.name)}</span> <span class="mono soft"><${Text}>${json(value.arguments, 0)}<//></span></p>${value.error && html`<p class="bad-text">${clean(value.error)}</p>`}</div>`;
  if (item.kind === "result") return html`<article class="message tool"><header><span class="role">Tool <span class="faint">· ${clean(value.name)}</span></span>${value.error && html`<${Chip} kind="bad">${clean(value.error)}<//>`}</header><div class="prose mono"><${Text}>${value.observation}<//></div></article>`;
  if (item.kind === "score") return html`<div class="chips"><${Chip} kind="accent" label="reward">${num(value.reward, 3)}<//>${Object.entries(value.components ?? {}).map(([name, part]) => html`<${Chip} key=${name} label=${clean(name)}>${num(part, 3)}<//>`)}${value.error && html`<${Chip} kind="bad">${clean(value.error)}<//>`}</div>`;
  return html`<p class="note">${words(clean(value.outcome))} · ${count(value.turns, "turn")} · ${count(value.tokens, "token")}${value.answer ? html` · answer: <strong><${Text}>${value.answer}<//></strong>` : ""}</p>`;
}

/** A whole reply: as text, or as its tokens coloured by log-prob. */
function Reply({ reply }) {
  const [tokens, setTokens] = useState(false);
  const low = Math.min(-1, ...(reply.logprobs ?? []));
  return html`<article class="message assistant"><header><span class="role">Assistant</span><span class="turn-info tnum"><span>${count(reply.ids?.length ?? 0, "token")}</span>${reply.seconds ? html`<span>${seconds(reply.seconds)}</span>` : ""}
      ${reply.stop === "length" && html`<${Chip} kind="warn">cut off<//>`}${reply.pieces && html`<button class="link-button" aria-pressed=${tokens} onClick=${() => setTokens(!tokens)}>${tokens ? "Text" : "Tokens"}</button>`}</span></header>
    ${tokens ? html`<div class="prose">${reply.pieces.map((piece, index) => html`<span key=${index} class=${`tok ${sequential(-reply.logprobs[index], 0, -low)}`} title=${`id ${reply.ids[index]}, log-prob ${num(reply.logprobs[index], 3)}, probability ${percent(Math.exp(reply.logprobs[index]))}`}>${clean(piece)}</span>`)}</div>`
      : html`<div class="prose"><${Text}>${reply.text}<//></div>`}</article>`;
}
