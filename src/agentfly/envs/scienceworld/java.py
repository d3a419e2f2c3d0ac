"""Is Java there, and the simulator's jar? Paths out, or `MissingExtra` with the cure in one sentence. Starts nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from ...errors import MissingExtra
from ...plugins import missing_extra

NEEDS = "the package scienceworld (pip install 'agentfly[scienceworld]') and Java 11 or newer"
NO_JAVA = (
    "ScienceWorld needs Java 11 or newer, and there is no `java` on the path: install one "
    "(apt install openjdk-17-jre-headless, brew install openjdk, or conda install openjdk) or set JAVA_HOME"
)


def find_java() -> str:
    """The java to run: that of $JAVA_HOME, else the one on the path."""
    if home := os.environ.get("JAVA_HOME"):
        found = shutil.which("java", path=str(Path(home) / "bin"))
        if found:
            return found
    found = shutil.which("java")
    if found is None:
        raise MissingExtra(NO_JAVA)
    return found


def find_simulator() -> tuple[Path, Path]:
    """The simulator's jar and that of py4j, through which Python talks to it."""
    for package in ("scienceworld", "py4j"):
        if importlib.util.find_spec(package) is None:
            raise missing_extra("ScienceWorld", "scienceworld")
    spec = importlib.util.find_spec("scienceworld")
    assert spec is not None
    assert spec.origin is not None
    jar = Path(spec.origin).parent / "scienceworld.jar"
    if not jar.is_file():
        raise MissingExtra(f"{jar} is not there: install the package again, pip install 'agentfly[scienceworld]'")
    from py4j.java_gateway import find_jar_path

    return jar, Path(find_jar_path())


def missing() -> str:
    """What is missing here, with its cure; empty where ScienceWorld can run."""
    try:
        find_simulator()
        find_java()
    except MissingExtra as error:
        return str(error)
    return ""
