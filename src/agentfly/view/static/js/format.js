// Numbers, times and untrusted text as people read them. Pure functions: node --test runs them.

/** Control characters become visible signs, as in the terminal. Tab and line feed stay. Bidirectional and
 * zero-width codes are shown by their number, because they can make a text read differently from what it is. */
export function clean(text) {
  return String(text ?? "").replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g,
    (character) => {
      const code = character.charCodeAt(0);
      if (code < 32) return String.fromCharCode(0x2400 + code);
      if (code === 127) return "\u2421";
      if (code < 0xa0) return "\ufffd";
      return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
    },
  );
}

/** A number with at most `digits` significant digits; an en dash if there is none. */
export function num(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return minus(value.toExponential(2).replace("e+", "e"));
  if (Number.isInteger(value)) return minus(value.toLocaleString("en-US"));
  const decimals = Math.max(0, Math.min(6, digits - 1 - Math.floor(Math.log10(size || 1))));
  return minus(value.toLocaleString("en-US", { maximumFractionDigits: Math.min(decimals, digits) }));
}

/** A number with its sign, for advantages and changes. */
export function signed(value, digits = 3) {
  return typeof value === "number" && value > 0 ? `+${num(value, digits)}` : num(value, digits);
}

const minus = (text) => text.replaceAll("-", "−");

/** A share as a percentage. */
export function percent(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value > 0 && value < 0.0005) return "< 0.1 %";
  return `${minus((value * 100).toLocaleString("en-US", { maximumFractionDigits: 1 }))} %`;
}

/** A duration: 12 ms, 3.4 s, 5 min 2 s, 3 h 12 min, 2 d 4 h. */
export function seconds(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value < 0) return `−${seconds(-value)}`;
  if (value === 0) return "0 s";
  if (value < 0.00095) return `${num(Math.round(value * 1e6))} µs`;
  if (value < 0.9995) return `${num(value * 1000, value < 0.01 ? 2 : 3)} ms`;
  if (value < 59.95) return `${num(value, 3)} s`;
  const [unit, small, big, names] =
    value < 3600 ? [60, 1, 60, ["min", "s"]] : value < 86400 ? [60, 60, 3600, ["h", "min"]] : [24, 3600, 86400, ["d", "h"]];
  let whole = Math.floor(value / big);
  let rest = Math.round((value - whole * big) / small);
  if (rest >= unit) [whole, rest] = [whole + 1, 0];
  return rest ? `${whole} ${names[0]} ${rest} ${names[1]}` : `${whole} ${names[0]}`;
}

/** How long ago: "now", "4 min ago". */
export function ago(age) {
  if (typeof age !== "number" || !Number.isFinite(age)) return "–";
  if (age < 5) return "now";
  const [size, name] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([each]) => age >= each);
  return `${Math.floor(age / size)} ${name} ago`;
}

/** A local date and time of unix seconds. */
export function when(time) {
  if (typeof time !== "number" || !time) return "–";
  return new Date(time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
}

/** The beginning of a text. */
export function cut(text, length) {
  const shown = String(text ?? "");
  return shown.length <= length ? shown : `${shown.slice(0, length - 1)}…`;
}

/** "max_turns" as "max turns". */
export const words = (name) => String(name ?? "").replaceAll("_", " ");

/** "1 chain", "5 chains". */
export const count = (number, noun) => `${num(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Any value as text for the raw view and for arguments. */
export function json(value, indent = 2) {
  return typeof value === "string" ? value : JSON.stringify(value, null, indent) ?? "";
}
