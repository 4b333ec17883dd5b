"""`make book-serve`: the site at an address of this machine, built again whenever something of it changes.

MkDocs watches pages, notebooks and the theme by itself. Its hooks are Python, which it imports once: when they
change, it is started anew.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = ("site/hooks", "site/drawings", "helios/book")


def changed_at() -> int:
    """When the newest of the modules that MkDocs has imported was written."""
    files = [path for folder in IMPORTED for path in (ROOT / folder).glob("*.py")]
    return max(path.stat().st_mtime_ns for path in [*files, ROOT / "pyproject.toml"])


def wait_for_change(since: int, process: subprocess.Popen[bytes]) -> None:
    """Return when a module is newer than `since`; say so once if MkDocs ends before that."""
    told = False
    while changed_at() <= since:
        if process.poll() is not None and not told:
            print("MkDocs has ended; it starts again when a hook is saved. Ctrl-C ends this.", file=sys.stderr)
            told = True
        time.sleep(0.5)


def main() -> int:
    """Serve until Ctrl-C; the port is the first argument (default 8001)."""
    port = sys.argv[1] if len(sys.argv) > 1 else "8001"
    command = [sys.executable, "-m", "mkdocs", "serve", "--livereload", "--dev-addr", f"127.0.0.1:{port}"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    while True:
        since = changed_at()
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            wait_for_change(since, process)
        except KeyboardInterrupt:
            return 0
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
