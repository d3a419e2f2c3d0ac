"""Charts of metrics: curves of runs with bands over seeds, drawn as SVG or in a terminal."""
