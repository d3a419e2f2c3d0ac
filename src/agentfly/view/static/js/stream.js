// A stream of events that a POST answers (EventSource can only GET).

/** Splits what has arrived into whole events: {events: [{event, data}], rest}. */
export function takeEvents(buffer) {
  const parts = buffer.replaceAll("\r\n", "\n").split("\n\n");
  const rest = parts.pop();
  const events = parts.map((part) => {
    const lines = part.split("\n").filter((line) => line && !line.startsWith(":"));
    const value = (name) => lines.filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).replace(/^ /, ""));
    return { event: value("event")[0] ?? "message", data: value("data").join("\n") };
  });
  return { events: events.filter((each) => each.data), rest };
}

/** Sends a body and calls `on(event, value)` for each event of the answer. Throws an Error with the server's sentence. */
export async function converse(path, body, on, abort) {
  const answer = await fetch(path, { method: "POST", signal: abort, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (!answer.ok || !answer.body) {
    const told = await answer.json().catch(() => ({}));
    throw new Error(told.error ?? `The server answered ${answer.status}.`);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const { events, rest } = takeEvents(buffer + value);
    buffer = rest;
    for (const each of events) on(each.event, JSON.parse(each.data));
  }
}
