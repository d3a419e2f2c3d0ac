// The conversation of a chain: messages with thinking and tool calls that fold, rewards and times of each turn.
import { html } from "./lib.js";
import { address, runPath } from "./router.js";
import { Card, Chip, Long, Reward, Text } from "./parts.js";
import { clean, cut, json, num, seconds, signed } from "./format.js";

/** Splits a reply into thinking and the rest: "<think>...</think> answer". An open tag at the end is thinking too. */
export function thinking(text) {
  const found = /^\s*<(think|thinking|reasoning)>([\s\S]*?)(?:<\/\1>([\s\S]*)|$)/.exec(text);
  return found ? { thought: found[2].trim(), rest: (found[3] ?? "").trim() } : { thought: "", rest: text };
}

const ROLES = { system: "System", user: "User", assistant: "Assistant", tool: "Tool" };

export function Talk({ run, chain }) {
  const byMessage = new Map(chain.turns.filter((turn) => turn.message !== null).map((turn) => [turn.message, turn]));
  // Replies that the messages no longer hold (a template rewrote history) are shown after them.
  const rest = chain.turns.filter((turn) => turn.message === null);
  return html`<div class="talk-page"><div class="talk">
    ${chain.messages.map((message, index) => html`<${Message} key=${index} run=${run} id=${chain.summary.id} message=${message} turn=${byMessage.get(index)} />`)}
    ${rest.map((turn) => html`<${Message} key=${`t${turn.turn}`} run=${run} id=${chain.summary.id} message=${{ role: "assistant", content: turn.text, tool_calls: turn.calls }} turn=${turn} />`)}
    ${!chain.messages.length && !chain.turns.length && html`<p class="note">The chain ended before its first message.</p>`}
  </div><${Beside} run=${run} chain=${chain} /></div>`;
}

/** What belongs to the chain but is not said in it: the fields of its task, and its siblings. */
function Beside({ run, chain }) {
  const fields = Object.entries(chain.task.fields ?? {});
  return html`<aside class="beside" aria-label="About the chain">
    ${fields.length > 0 && html`<${Card} title="Task"><dl class="facts">${fields.slice(0, 20).map(([name, value]) => html`<div key=${name}><dt>${clean(name)}</dt><dd><${Text}>${cut(json(value, 0), 300)}<//></dd></div>`)}</dl><//>`}
    ${chain.siblings.length > 1 && html`<${Card} title="Siblings"><ul class="sibling-list">${chain.siblings.map((each) => html`<li key=${each.id}><a href=${runPath(run, "chain", each.id)} aria-current=${each.id === chain.summary.id ? "true" : undefined}><span>chain ${each.chain}</span><${Reward} value=${each.score} /></a></li>`)}</ul><//>`}
  </aside>`;
}

export function Message({ run, id, message, turn, live = false }) {
  const reply = message.role === "assistant";
  const { thought, rest } = reply ? thinking(message.content) : { thought: "", rest: message.content };
  const calls = turn?.calls?.length ? turn.calls : message.tool_calls ?? [];
  return html`<article class=${`message ${message.role}`}>
    <header><span class="role">${ROLES[message.role] ?? clean(message.role)}${message.name ? html`<span class="faint"> · ${clean(message.name)}</span>` : ""}</span>
      ${turn && html`<span class="turn-info tnum"><span title=${turn.state ? `State: ${clean(turn.state)}` : undefined}>turn ${turn.turn + 1}</span>
        ${turn.why && turn.why !== "first" ? html`<span title="A training row begins here.">new row: ${clean(turn.why)}</span>` : ""}
        ${turn.num_tokens ? html`<span>${num(turn.num_tokens)} tokens</span>` : ""}${turn.generate_s ? html`<span>${seconds(turn.generate_s)}</span>` : ""}
        ${turn.reward ? html`<span class=${turn.reward > 0 ? "good-text" : "bad-text"}>reward ${signed(turn.reward)}</span>` : ""}
        ${turn.stop === "length" && html`<${Chip} kind="warn" title="The reply reached the limit of tokens.">cut off<//>`}
        ${run && html`<a class="inline-link" href=${address(runPath(run, "chat"), { fork: id, turn: turn.turn })} title="Talk on from here">Fork</a>`}</span>`}</header>
    ${thought && html`<details class="thought" open=${live}><summary>Thinking · ${num(thought.length)} characters</summary><${Long} text=${thought} /></details>`}
    ${rest && html`<${Long} text=${rest} className=${message.role === "tool" ? "mono" : ""} limit=${message.role === "system" ? 600 : 4000} />`}
    ${message.images > 0 && html`<p class="note">${num(message.images)} images, which are not stored.</p>`}
    ${calls.map((call, index) => html`<${Call} key=${index} call=${call} result=${turn?.results?.[index]} time=${turn?.calls_s?.[index]} />`)}
  </article>`;
}

function Call({ call, result, time }) {
  const bad = call.error || result?.error;
  return html`<details class=${`call ${bad ? "bad" : ""}`} open>
    <summary><span class="mono strong">${clean(call.name)}</span>
      ${time > 0 && html`<span class="faint tnum">${seconds(time)}</span>`}${bad && html`<${Chip} kind="bad">${clean(result?.error ?? "not parsed")}<//>`}
      ${result?.reward ? html`<span class="tnum">reward ${signed(result.reward)}</span>` : ""}${result?.done && html`<${Chip}>done<//>`}</summary>
    <pre class="arguments"><${Text}>${json(call.arguments)}<//></pre>
    ${call.error && html`<p class="bad-text"><${Text}>${call.error}<//></p>`}
    ${result && html`<div class="observation mono"><${Long} text=${result.observation} limit=${1200} /></div>`}</details>`;
}
