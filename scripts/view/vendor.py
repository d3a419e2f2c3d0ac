"""Makes the two third-party modules of the dashboard: python scripts/view/vendor.py

Needs npm. Installs the packages of PACKAGES in a temporary folder, bundles them with esbuild and writes the modules, their
licences and `vendor.json` (name, version, licence, SHA-256) to src/agentfly/view/static/vendor. A test compares the hashes.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "src/agentfly/view/static/vendor"
PACKAGES = {
    "preact": "11.2.0",
    "@preact/signals": "2.11.4",
    "@preact/signals-core": "1.14.5",
    "htm": "3.1.1",
    "uplot": "1.6.32",
}
ESBUILD = "0.28.2"
PREACT = """
export { h, Fragment, render, createContext } from "preact";
export { useState, useEffect, useRef, useMemo, useCallback, useLayoutEffect } from "preact/hooks";
export { signal, computed, effect, batch, useSignal, useComputed, useSignalEffect } from "@preact/signals";
export { html } from "htm/preact";
"""
UPLOT = 'export { default } from "uplot";\n'
MODULES = {
    "preact.js": (PREACT, ["preact", "@preact/signals", "@preact/signals-core", "htm"]),
    "uplot.js": (UPLOT, ["uplot"]),
}


def main() -> int:
    """Writes the folder anew. Returns the exit status."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "package.json").write_text('{"private": true}')
        wanted = [f"{package}@{version}" for package, version in PACKAGES.items()]
        npm = ["npm", "install", "--no-audit", "--no-fund", "--save-exact", *wanted, f"esbuild@{ESBUILD}"]
        subprocess.run(npm, cwd=work, check=True)
        for module, (source, _) in MODULES.items():
            (work / f"entry-{module}").write_text(source)
            build = [str(work / "node_modules/.bin/esbuild"), f"entry-{module}", "--bundle", "--minify", "--format=esm"]
            build += ["--target=es2022", "--legal-comments=none", "--charset=utf8", f"--outfile={FOLDER / module}"]
            subprocess.run(build, cwd=work, check=True)
        (FOLDER / "uplot.css").write_bytes((work / "node_modules/uplot/dist/uPlot.min.css").read_bytes())
        write_lists(work / "node_modules")
    return 0


def write_lists(modules: Path) -> None:
    """Writes LICENSES.txt and vendor.json."""
    licences, packages = [], []
    for package, version in PACKAGES.items():
        about = json.loads((modules / package / "package.json").read_text(encoding="utf-8"))
        if about["version"] != version:
            raise SystemExit(f"npm installed {package} {about['version']}, not {version}")
        text = next((modules / package).glob("LICEN[CS]E*")).read_text(encoding="utf-8")
        licences.append(f"{package} {version} ({about['license']})\n\n{text.strip()}\n")
        packages.append({"name": package, "version": version, "licence": about["license"]})
    (FOLDER / "LICENSES.txt").write_text(("\n" + "-" * 80 + "\n\n").join(licences), encoding="utf-8")
    parts = {**{module: names for module, (_, names) in MODULES.items()}, "uplot.css": ["uplot"]}
    files = [
        {"file": file, "sha256": hashlib.sha256((FOLDER / file).read_bytes()).hexdigest(), "packages": names}
        for file, names in parts.items()
    ]
    listing = {"made_by": "scripts/view/vendor.py", "esbuild": ESBUILD, "packages": packages, "files": files}
    (FOLDER / "vendor.json").write_text(json.dumps(listing, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
