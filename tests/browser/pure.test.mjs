// Pure functions of the dashboard. Run by `node --test`; tests/browser/test_modules.py does that where node exists.
import assert from "node:assert/strict";
import test from "node:test";

const folder = new URL("../../src/agentfly/view/static/js/", import.meta.url);
const { clean, num, seconds, ago, signed, cut, count } = await import(new URL("format.js", folder));
const { smooth, curve, align, band, family, families, at } = await import(new URL("curves.js", folder));
const { percentile, range, painter, modes, diverging, sequential } = await import(new URL("scales.js", folder));
const { breakLines, visibleRows, firstDifference, bars, flatten, walk } = await import(new URL("layout.js", folder));
const { takeEvents } = await import(new URL("stream.js", folder));

test("control characters become visible, and line feeds stay", () => {
  assert.equal(clean("a\u001b[31mb\nc\td\u0000"), "a␛[31mb\nc\td␀");
  assert.equal(clean("\u007f\u009b"), "␡\ufffd");
});

test("codes that reorder or hide text are shown by their number", () => {
  assert.equal(clean("a\u202eb"), "a⟨U+202E⟩b");
  assert.equal(clean("\u200b\ufeff\u2066"), "⟨U+200B⟩⟨U+FEFF⟩⟨U+2066⟩");
  assert.equal(clean("\ud83d\ude00 ok"), "\ud83d\ude00 ok");
  assert.equal(clean("\ud83d alone"), "⟨U+D83D⟩ alone");
});

test("numbers are short and never NaN", () => {
  assert.equal(num(null), "–");
  assert.equal(num(NaN), "–");
  assert.equal(num(Infinity), "∞");
  assert.equal(num(0.123456), "0.1235");
  assert.equal(num(0.875, 3), "0.875");
  assert.equal(num(1234567), "1,234,567");
  assert.equal(num(0.0000123), "1.23e−5");
  assert.equal(num(-2.5), "−2.5");
  assert.equal(signed(0.5), "+0.5");
});

test("durations carry over to the next unit", () => {
  assert.equal(seconds(0.0123), "12.3 ms");
  assert.equal(seconds(0.00002), "20 µs");
  assert.equal(seconds(3.456), "3.46 s");
  assert.equal(seconds(59.99), "1 min");
  assert.equal(seconds(61), "1 min 1 s");
  assert.equal(seconds(3599.9), "60 min");
  assert.equal(seconds(7260), "2 h 1 min");
  assert.equal(ago(3), "now");
  assert.equal(ago(7300), "2 h ago");
  assert.equal(cut("abcdef", 4), "abc…");
  assert.equal(count(1, "chain"), "1 chain");
});

test("smoothing of a constant is the constant from its first value on", () => {
  for (const value of smooth([2, 2, 2, 2], 0.9)) assert.ok(Math.abs(value - 2) < 1e-12);
  assert.deepEqual(smooth([1, null, 3], 0), [1, null, 3]);
  assert.equal(smooth([1, null, 3], 0.5)[1], null);
});

test("a curve over wall time begins at 0 and keeps its steps", () => {
  const line = curve([[0, 100, 1], [1, 110, null], [2, 130, 3]], "time");
  assert.deepEqual(line.x, [0, 30]);
  assert.deepEqual(line.y, [1, 3]);
  assert.deepEqual(line.steps, [0, 2]);
  assert.deepEqual(curve([[0, null, 1]], "time").x, []);
});

test("aligned curves have gaps where they have no point", () => {
  assert.deepEqual(align([{ x: [0, 2], y: [1, 2] }, { x: [1, 2], y: [5, 6] }]), [[0, 1, 2], [1, null, 2], [null, 5, 6]]);
});

test("a band interpolates seeds that report at different steps", () => {
  const spread = band([{ x: [0, 2], y: [0, 2] }, { x: [0, 1, 2], y: [1, 3, 5] }]);
  assert.deepEqual(spread.mean, [0.5, 2, 3.5]);
  assert.deepEqual(spread.low, [0, 1, 2]);
  assert.deepEqual(spread.high, [1, 3, 5]);
  assert.equal(at({ x: [0, 1], y: [0, 1] }, 2), null);
});

test("runs that differ by their seed are a family", () => {
  assert.equal(family("grpo-seed3"), "grpo");
  assert.equal(family("grpo_s12"), "grpo");
  assert.equal(family("exp/grpo-seed=3"), "exp/grpo");
  assert.equal(family("steps"), "steps");
  assert.equal(family("seed1"), "seed1");
  const about = [{ name: "a-seed1", algorithm: "grpo" }, { name: "a-seed2", algorithm: "grpo" }, { name: "a-seed3", algorithm: "rloo" }];
  assert.deepEqual(families(["a-seed1", "a-seed2", "a-seed3"], about), [["a", ["a-seed1", "a-seed2"]], ["a-seed3", ["a-seed3"]]]);
});

test("the colour scale ignores context and the one outlier", () => {
  const values = [-30, ...Array.from({ length: 199 }, (_, i) => -i / 200), -99];
  const mask = [...Array(200).fill(1), 0];
  const [low, high] = range(values, mask);
  assert.ok(low > -2 && high <= 0);
  assert.equal(range([1, 2], [0, 0]), null);
  assert.equal(percentile([1, 2, 3], 0.5), 2);
});

test("values are coloured only where the mask is 1", () => {
  const row = { ids: [1, 2, 3], mask: [0, 1, 1], logprob: [null, -0.1, -5], version: [null, 3, 4], advantage: [null, 1, -1], trained: [null, true, false] };
  assert.deepEqual(modes(row), ["mask", "logprob", "version", "advantage"]);
  assert.deepEqual([0, 1, 2].map(painter(row, "mask").paint), ["ctx", "trained", "dropped"]);
  assert.deepEqual([0, 1, 2].map(painter(row, "logprob").paint), ["ctx", "seq0", "seq8"]);
  assert.deepEqual([0, 1, 2].map(painter(row, "advantage").paint), ["ctx", "div8", "div0"]);
  assert.deepEqual([0, 1, 2].map(painter(row, "version").paint), ["ctx", "cat0", "cat1"]);
});

test("the ratio is exp(trainer - engine), and 1 is the centre", () => {
  const row = { ids: [1, 2], mask: [1, 1], logprob: [-1, -1], trainer_logprob: [-1, -2] };
  assert.deepEqual([0, 1].map(painter(row, "ratio").paint), ["div4", "div0"]);
  assert.equal(diverging(5, 5, 0), "div4");
  assert.equal(sequential(1, 1, 1), "seq0");
});

test("lines break at line feeds and at the width, and lose no character", () => {
  const lines = breakLines(["ab", "c\nd", "efghij"], 4);
  assert.deepEqual(lines.map((line) => line.map((part) => part.text).join("")), ["abc↵", "defg", "hij"]);
  assert.deepEqual(lines[1], [{ token: 1, text: "d" }, { token: 2, text: "efg" }]);
  assert.equal(breakLines(["漢字", "ab"], 4).length, 2);
  assert.deepEqual(breakLines([""], 4), [[{ token: 0, text: "∅" }]]);
});

test("only the visible rows and a few more are shown", () => {
  assert.deepEqual(visibleRows(0, 400, 40, 100000), { first: 0, last: 18 });
  assert.deepEqual(visibleRows(4000, 400, 40, 100000), { first: 92, last: 118 });
  assert.deepEqual(visibleRows(9999999, 400, 40, 10), { first: 10, last: 10 });
});

test("moves among siblings add up, stay at the ends, and wait for an unknown group", () => {
  assert.equal(walk(["a", "b", "c"], "b", [-1]), "a");
  assert.equal(walk(["a", "b", "c"], "b", [-1, 1]), "b");
  assert.equal(walk(["a", "b", "c"], "a", [-1, 1]), "b");
  assert.equal(walk(["a", "b", "c"], "a", [1, 1, 1]), "c");
  assert.equal(walk(["a", "b"], "z", [1]), null);
  assert.equal(walk([], "a", [1]), null);
});

test("small helpers", () => {
  assert.equal(firstDifference([1, 2, 3], [1, 2, 4]), 2);
  assert.equal(firstDifference([1, 2], [1, 2, 3]), 2);
  assert.equal(firstDifference("ab", "ab"), -1);
  assert.deepEqual(bars({ edges: [0, 1, 2], counts: [1, 4] })[0], { low: 0, high: 1, count: 1, share: 0.25 });
  assert.deepEqual(bars({ edges: [], counts: [] }), []);
  assert.deepEqual(flatten({ a: { b: 1, c: [2] }, d: null }), { "a.b": 1, "a.c": [2], d: null });
});

test("events of a stream are taken whole", () => {
  const { events, rest } = takeEvents('event: text\ndata: {"text":"a"}\n\n: beat\n\nevent: end\ndata: {"x"');
  assert.deepEqual(events, [{ event: "text", data: '{"text":"a"}' }]);
  assert.equal(rest, 'event: end\ndata: {"x"');
});
