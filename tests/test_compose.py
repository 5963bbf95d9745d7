"""docker-compose.yml is valid and means the processes that exist (no engine is needed to know that)."""

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def test_follows_the_compose_specification(compose: dict[str, Any]) -> None:
    """The file holds against the specification's JSON schema (as check-jsonschema carries it)."""
    files = metadata.files("check-jsonschema") or []
    schema = next(file for file in files if file.name == "compose-spec.json")
    jsonschema.validate(compose, json.loads(schema.read_text()))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(compose | {"services": {"x": {"immage": "y"}}}, json.loads(schema.read_text()))


def test_every_image_is_pinned(compose: dict[str, Any]) -> None:
    """Each image, and the Dockerfile's base, names a full version."""
    images = [service["image"] for service in compose["services"].values()]
    images += re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert len(images) > 5
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


def test_every_process_is_a_command(compose: dict[str, Any]) -> None:
    """What a service runs parses as a `headrace` command with the settings it is given."""
    from headrace.cli.entry import build_parser

    ours = {n: s for n, s in compose["services"].items() if s["image"].startswith("headrace:")}
    assert {"prompts", "rollouts", "inference", "experience", "trainer", "relay"} <= set(ours)
    for service in ours.values():
        parsed = build_parser(only=service["command"][0]).parse_args(service["command"])
        assert parsed.command == service["command"][0]


def test_settings_in_the_environment_are_known(compose: dict[str, Any]) -> None:
    """Each HEADRACE_ variable is a setting; an unknown one would stop the process at its start."""
    from headrace.cli.settings import Settings
    from headrace.config import resolve

    environment = compose["services"]["trainer"]["environment"]
    settings = resolve(Settings, environment=environment)
    assert settings.bus.address == "kafka:kafka:9092"
    assert settings.inference.address == "0.0.0.0:7070"
    relay = compose["services"]["relay"]
    assert resolve(Settings, environment=relay["environment"]).relay.cache == "redis://redis:6379/0"
    assert relay["environment"].items() > environment.items()
    assert relay["depends_on"].keys() == {"topics", "redis"}


def test_profiles(compose: dict[str, Any]) -> None:
    """`loop` starts the processes, `tools` the topic browser; broker and Redis come with either."""
    by_profile: dict[str, set[str]] = {}
    for name, service in compose["services"].items():
        for profile in service.get("profiles", ["always"]):
            by_profile.setdefault(profile, set()).add(name)
    assert by_profile["always"] == {"kafka", "redis"}
    assert by_profile["tools"] == {"topic-browser"}
    assert "trainer" in by_profile["loop"]
