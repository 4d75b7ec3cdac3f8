"""What decides whether a layout on disk is still that of the code."""

from __future__ import annotations

import os
import subprocess

from locater.discovery.cache_on_disk import CODE
from tests import ROOT
from tests.processes import python

# they print, name and write; no number comes from them
PLAIN = {"brief", "errors", "files", "markup", "registry", "redacted_and_escaped_text", "version"}
IMPORT_ALL = """
import importlib, pkgutil, sys
import locater.discovery as room
for module in pkgutil.walk_packages(room.__path__, "locater.discovery."):
    importlib.import_module(module.name)
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("locater.")}))
"""


def test_all_code_that_discovery_imports_counts() -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([python(), "-c", IMPORT_ALL], env=variables, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) - PLAIN == set(CODE)
