"""Schemathesis walks the description at /openapi.json: it sends what that allows and what it does not, and compares statuses,
types and bodies of the answers with it."""

import os
import subprocess
import sys
from pathlib import Path

from run import HERE, LOCAL, check

# What is held, of everything that Schemathesis knows; instead of its `positive_data_acceptance`, which takes no reasons, that of acceptance.py.
CHECKS = [
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method",
    "what_is_allowed_is_accepted",
]


def walk(url):
    program = Path(sys.prefix) / "bin" / "schemathesis"
    examples = os.environ.get("LOAF_EXAMPLES", "60")
    arguments = [program, "run", f"{url}/openapi.json", "--url", url, "--checks", ",".join(CHECKS), "--max-examples", examples]
    arguments += ["--seed", "1", "--phases", "examples,coverage,fuzzing", "--workers", "1", "--request-timeout", "120"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "acceptance", "PYTHONPATH": str(HERE)}
    done = subprocess.run([str(a) for a in arguments], cwd=LOCAL, env=environment)
    check("Schemathesis", done.returncode == 0, f"exit code {done.returncode}")
