// The parts of a step's time, in the order of the step. They add up to time/step_s.
const LIST = [
  ["time/environments_s", "environments", "s1"], ["time/prefill_s", "prefill", "s4"], ["time/decode_s", "decode", "s0"], ["time/sampling_s", "sampling", "s0"],
  ["time/tools_s", "tools", "s2"], ["time/scoring_s", "scoring", "s5"], ["time/host_s", "Python", "s7"], ["time/learn_s", "learning", "s3"],
  ["time/handover_s", "hand-over", "s6"], ["time/validate_s", "validation", "v-val"], ["time/store_s", "store", "v-store"], ["time/save_s", "checkpoint", "v-save"], ["time/idle_s", "idle", "k-mute"],
];
export const PHASES = LIST;

/** Mean seconds of each part over the newest `count` steps: [{name, value, kind, title}], without those below a thousandth. */
export function phaseParts(series, count) {
  const newest = Math.max(-1, ...LIST.flatMap(([name]) => (series[name] ?? []).slice(-1).map((point) => point[0])));
  const parts = LIST.map(([metric, name, kind]) => {
    const values = (series[metric] ?? []).filter(([step, , value]) => step > newest - count && Number.isFinite(value)).map((point) => point[2]);
    return { name, kind, value: values.reduce((sum, value) => sum + value, 0) / Math.max(1, Math.min(count, newest + 1)) };
  });
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  return parts.filter((part) => part.value > total / 1000).map((part) => ({ ...part, title: `${part.name}: ${((part.value / total) * 100).toFixed(1)} %` }));
}
