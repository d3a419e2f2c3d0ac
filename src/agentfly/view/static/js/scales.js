// Colour scales of the token view. Pure functions: they return names of CSS classes, so that the theme decides the colours.

/** The value below which `share` of the sorted values lie. */
export function percentile(sorted, share) {
  if (!sorted.length) return 0;
  const place = (sorted.length - 1) * share;
  const low = Math.floor(place);
  const high = Math.ceil(place);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}

/** [low, high]: the 1st and 99th percentile of the finite values where the mask is 1. One outlier does not flatten the scale. */
export function range(values, mask) {
  const used = [];
  for (let i = 0; i < (values?.length ?? 0); i++) {
    const value = values[i];
    if (mask[i] && value !== null && value !== undefined && Number.isFinite(value)) used.push(value);
  }
  used.sort((a, b) => a - b);
  return used.length ? [percentile(used, 0.01), percentile(used, 0.99)] : null;
}

export const LEVELS = 9;

const level = (share) => Math.max(0, Math.min(LEVELS - 1, Math.floor(share * LEVELS)));

/** Class of a value on a scale from low to high: seq0 .. seq8. */
export function sequential(value, low, high) {
  return `seq${level(high > low ? (value - low) / (high - low) : 0)}`;
}

/** Class of a value around a centre: div0 (far below) .. div4 (centre) .. div8 (far above). */
export function diverging(value, centre, reach) {
  if (!(reach > 0)) return "div4";
  const share = Math.max(-1, Math.min(1, (value - centre) / reach));
  return `div${Math.round((share + 1) * 4)}`;
}

/** Class of one of few categories: cat0 .. cat7. */
export const categorical = (index) => `cat${((index % 8) + 8) % 8}`;

/** The ways to colour a row of tokens: those whose values the row has. */
export function modes(row) {
  const has = (name) => Array.isArray(row[name]) && row[name].some((value) => value !== null && value !== undefined);
  const all = [["mask", true], ["logprob", has("logprob")], ["ratio", has("trainer_logprob") && has("logprob")]];
  all.push(["entropy", has("entropy")], ["version", has("version")], ["advantage", has("advantage")]);
  return all.filter(([, there]) => there).map(([name]) => name);
}

/** The values that a mode colours by: ratio = exp(trainer - engine); others as stored. */
export function values(row, mode) {
  if (mode !== "ratio") return row[mode];
  return row.logprob.map((mine, index) => {
    const trainer = row.trainer_logprob[index];
    return mine === null || trainer === null || trainer === undefined ? null : Math.exp(trainer - mine);
  });
}

/** A function from token index to CSS class, and the legend of the scale: [[class, label], ...]. */
export function painter(row, mode) {
  const mask = row.mask;
  if (mode === "mask") {
    const dropped = row.trained ?? [];
    const paint = (i) => (!mask[i] ? "ctx" : dropped[i] === 0 || dropped[i] === false ? "dropped" : "trained");
    return { paint, legend: [["trained", "trained"], ["dropped", "sampled, not trained"], ["ctx", "context"]] };
  }
  const series = values(row, mode) ?? [];
  const show = (i) => mask[i] && series[i] !== null && series[i] !== undefined && Number.isFinite(series[i]);
  if (mode === "version") {
    const known = [...new Set(series.filter((_, i) => show(i)))].sort((a, b) => a - b);
    const place = new Map(known.map((version, index) => [version, index]));
    const paint = (i) => (show(i) ? categorical(place.get(series[i])) : "ctx");
    return { paint, legend: known.slice(-8).map((version) => [categorical(place.get(version)), `version ${version}`]) };
  }
  const [low, high] = range(series, mask) ?? [0, 0];
  if (mode === "advantage" || mode === "ratio") {
    const centre = mode === "ratio" ? 1 : 0;
    const reach = Math.max(Math.abs(high - centre), Math.abs(low - centre));
    const paint = (i) => (show(i) ? diverging(series[i], centre, reach) : "ctx");
    const legend = [0, 2, 4, 6, 8].map((index) => [`div${index}`, centre + ((index - 4) / 4) * reach]);
    return { paint, legend };
  }
  // A low log-prob and a high entropy are what one looks for: both get the strong end of the scale.
  const flip = mode === "logprob";
  const paint = (i) => (!show(i) ? "ctx" : flip ? sequential(-series[i], -high, -low) : sequential(series[i], low, high));
  const legend = [0, 2, 4, 6, 8].map((index) => [`seq${index}`, flip ? high + (index / 8) * (low - high) : low + (index / 8) * (high - low)]);
  return { paint, legend };
}
