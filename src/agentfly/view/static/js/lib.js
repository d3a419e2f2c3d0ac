// The one place that names the vendored module of Preact, its hooks, signals and htm.
export * from "../vendor/preact.js";
