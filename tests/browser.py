"""A page in a real browser: opened, driven by a script, and read as it stands then."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]


def opened(page: Path, scratch: Path, script: str = "", *, width: int = 420) -> tuple[str, str]:
    """The page as it stands after a script, and what that pushed onto `seen`; an error of the page is pushed too.

    Args:
        page: an HTML file; a driven copy is laid beside it for as long as it is open.
        scratch: a folder for the browser's own files.
        script: run when the page is loaded.
        width: of the window; 420 is a phone's.
    """
    driver = f"""<script>
    const seen = [];
    addEventListener("error", (event) => seen.push("error: " + event.message));
    addEventListener("load", () => {{
      {script}
      seen.push("wide: " + (document.documentElement.scrollWidth <= innerWidth));
      document.body.setAttribute("data-seen", seen.join(" | "));
    }});
    </script>"""
    file = page.with_name(f"driven-{page.name}")
    file.write_text(page.read_text(encoding="utf-8").replace("</head>", driver + "</head>", 1), encoding="utf-8")
    try:
        dump = subprocess.run(
            [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", *QUIET, f"--window-size={width},900",
             f"--user-data-dir={scratch / 'browser'}", "--dump-dom", file.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout  # fmt: skip
    finally:
        file.unlink()
    found = re.search(r'data-seen="([^"]*)"', dump)
    assert found, dump[-500:]
    assert 'data-ready="yes"' in dump, found[1]
    return dump, found[1]
