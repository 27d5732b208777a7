"""`python -m labkit.doctor [--json]`, for where the `labkit` command itself does not start."""

import sys

from labkit.doctor import run

sys.exit(run(as_json="--json" in sys.argv[1:]))
