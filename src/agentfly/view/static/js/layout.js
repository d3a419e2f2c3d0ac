// Lines of tokens, and which rows of a long list are visible. Pure functions.

/** Columns that a character takes in a monospace font: 0, 1 or 2. */
function width(code) {
  if (code < 0x300) return 1;
  if ((code >= 0x300 && code <= 0x36f) || (code >= 0xfe00 && code <= 0xfe0f)) return 0;
  const wide = (code >= 0x1100 && code <= 0x115f) || (code >= 0x2e80 && code <= 0xa4cf) || (code >= 0xac00 && code <= 0xd7a3);
  return wide || (code >= 0xf900 && code <= 0xfaff) || (code >= 0xfe30 && code <= 0xfe6f) || (code >= 0xff00 && code <= 0xff60) || code >= 0x1f300 ? 2 : 1;
}

/** Breaks the pieces of a row of tokens into lines of at most `columns`: [[{token, text}, ...], ...].
 * A line feed is shown as ↵ and ends its line. A piece longer than a line continues on the next. */
export function breakLines(pieces, columns, visible = (text) => text) {
  const lines = [];
  let line = [];
  let used = 0;
  const finish = () => {
    lines.push(line);
    line = [];
    used = 0;
  };
  pieces.forEach((piece, token) => {
    let text = "";
    const flush = () => {
      if (text) line.push({ token, text });
      text = "";
    };
    const shown = visible(piece).replaceAll("\t", "→   ");
    if (shown === "") line.push({ token, text: "∅" }), (used += 1);
    for (const character of shown) {
      if (character === "\n") {
        text += "↵";
        flush();
        finish();
        continue;
      }
      const wide = width(character.codePointAt(0));
      if (used + wide > columns) {
        flush();
        finish();
      }
      text += character;
      used += wide;
    }
    flush();
  });
  if (line.length) finish();
  return lines;
}

/** Which rows of fixed height are visible, with `extra` rows on both sides: {first, last} (last is exclusive). */
export function visibleRows(scrollTop, viewHeight, rowHeight, total, extra = 8) {
  const first = Math.max(0, Math.floor(scrollTop / rowHeight) - extra);
  const last = Math.min(total, Math.ceil((scrollTop + viewHeight) / rowHeight) + extra);
  return { first: Math.min(first, last), last };
}

/** The member of a list that moves of +1 and -1 lead to from `id`. A move beyond an end stays. null: `id` is not in the list. */
export function walk(ids, id, moves) {
  const start = ids.indexOf(id);
  if (start < 0) return null;
  return ids[moves.reduce((at, by) => Math.max(0, Math.min(ids.length - 1, at + by)), start)];
}

/** Index of the first difference of two sequences, or -1 if they are equal. */
export function firstDifference(one, other) {
  const shared = Math.min(one.length, other.length);
  for (let i = 0; i < shared; i++) if (one[i] !== other[i]) return i;
  return one.length === other.length ? -1 : shared;
}

/** The edges and counts of a histogram as bars: [{low, high, count, share}] with share of the highest. */
export function bars(histogram) {
  const counts = histogram?.counts ?? [];
  const top = Math.max(1, ...counts);
  return counts.map((count, i) => ({ low: histogram.edges[i], high: histogram.edges[i + 1], count, share: count / top }));
}

/** Flattens a nested config: {"a.b": value}. */
export function flatten(value, prefix = "", out = {}) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [name, inner] of Object.entries(value)) flatten(inner, prefix ? `${prefix}.${name}` : name, out);
  } else out[prefix] = value;
  return out;
}
