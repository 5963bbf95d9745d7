"""The Faust app's settings, without a broker. One process for all: importing Faust takes seconds of a busy
machine."""

import os
import subprocess
import sys

CODE = """
from headrace.errors import ConfigError
from headrace.streams.app import app, experience_app

app.conf.web_enabled = True  # as `faust worker` does
print(app.conf.id, list(app.boot_strategy.web_server()))
for environment in (
    {},
    {"HEADRACE_BUS__ADDRESS": "sqlite:log.db"},
    {"HEADRACE_BUS__ADDRESS": "kafka:localhost:1"},
    {"HEADRACE_FAUST__STOER": "memory"},
):
    try:
        experience_app(environment)
    except ConfigError as error:
        print(error)
"""


def test_app_checks_its_settings_and_serves_no_tables() -> None:
    """A missing or misspelt setting is refused by name; Faust's web server stays off although its command
    line turns it on."""
    environment = {
        **os.environ,
        "HEADRACE_BUS__ADDRESS": "kafka:localhost:1",
        "HEADRACE_STORE__URI": "memory:///",
    }
    found = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=100, check=True
    )
    served, nothing, sqlite, store, misspelt = found.stdout.splitlines()
    assert served == "headrace-streams-experience []"
    assert nothing == "HEADRACE_BUS__ADDRESS: expected kafka:host:port, got ''"
    assert sqlite == "HEADRACE_BUS__ADDRESS: expected kafka:host:port, got 'sqlite:log.db'"
    assert store.startswith("HEADRACE_STORE__URI: expected where blobs live")
    assert misspelt.startswith("environment HEADRACE_FAUST__STOER") and "store" in misspelt
