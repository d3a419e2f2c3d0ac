// Curves: smoothing, alignment of several runs on one axis, bands over seeds. Pure functions.

/** Exponential moving average with the bias of its start removed. `weight` 0 leaves the values as they are. */
export function smooth(values, weight) {
  if (!(weight > 0)) return values.slice();
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return null;
    sum = sum * weight + value * (1 - weight);
    mass = mass * weight + (1 - weight);
    return sum / mass;
  });
}

/** Points [[step, time, value], ...] of one curve as {x, y}, in the order of x. `axis`: "step", or "time" in seconds since the first point. */
export function curve(points, axis, weight = 0) {
  const usable = (points ?? []).filter(([, time, value]) => value !== null && Number.isFinite(value) && (axis === "step" || time));
  const start = usable.length ? usable[0][1] : 0;
  const rows = usable.map(([step, time, value]) => [axis === "time" ? time - start : step, value, step]);
  rows.sort((a, b) => a[0] - b[0]);
  return { x: rows.map((row) => row[0]), y: smooth(rows.map((row) => row[1]), weight), steps: rows.map((row) => row[2]) };
}

/** Several {x, y} on the union of their x: [xs, ys...], null where a curve has no point there. */
export function align(curves) {
  const xs = [...new Set(curves.flatMap((each) => each.x))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  const columns = curves.map((each) => {
    const column = new Array(xs.length).fill(null);
    each.x.forEach((x, index) => (column[place.get(x)] = each.y[index]));
    return column;
  });
  return [xs, ...columns];
}

/** Linear interpolation of {x, y} at `at`; null outside its range. */
export function at(line, x) {
  const { x: xs, y: ys } = line;
  if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  if (xs[high] === xs[low]) return ys[low];
  const share = (x - xs[low]) / (xs[high] - xs[low]);
  return ys[low] + share * (ys[high] - ys[low]);
}

/** Mean, lowest and highest of several curves at each x of their union; x with one curve alone has no band. */
export function band(curves) {
  const xs = [...new Set(curves.flatMap((each) => each.x))].sort((a, b) => a - b);
  const out = { x: xs, mean: [], low: [], high: [] };
  for (const x of xs) {
    const values = curves.map((each) => at(each, x)).filter((value) => value !== null && Number.isFinite(value));
    out.mean.push(values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
    out.low.push(values.length > 1 ? Math.min(...values) : null);
    out.high.push(values.length > 1 ? Math.max(...values) : null);
  }
  return out;
}

/** The name of a run without its seed: "grpo-seed3" and "grpo_s12" are seeds of "grpo". */
export function family(name) {
  const found = /^(.*?)[-_. ]?(?:seed|s)[-_=]?\d+$/i.exec(name);
  return found && found[1] ? found[1] : name;
}

/** [[label, [run, ...]], ...]: runs that differ by their seed alone together. `about` = [{name, model, world, algorithm}] of known runs. */
export function families(names, about = []) {
  const found = new Map();
  for (const name of names) {
    const { model, world, algorithm } = about.find((run) => run.name === name) ?? {};
    const key = JSON.stringify([family(name), model, world, algorithm]);
    found.set(key, [...(found.get(key) ?? []), name]);
  }
  return [...found.values()].map((members) => [members.length > 1 ? family(members[0]) : members[0], members]);
}

/** The values that a log axis can show: others become null. */
export const positive = (values) => values.map((value) => (value > 0 ? value : null));
