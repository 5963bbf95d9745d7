"""The command line's own behaviour: help, errors, exit codes, flags."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cli import main, options
from headrace.cli.entry import COMMANDS, build_parser, split_dotted
from headrace.errors import ConfigError

HEAVY = ("torch", "numpy", "grpc", "aiokafka", "faust", "matplotlib", "rich", "obstore")


def test_help_is_light() -> None:
    """No command's `--help` imports anything heavy, and one answers in half a second of processor time."""
    code = (
        "import sys\n"
        "from headrace.cli.entry import build_parser\n"
        "build_parser().format_help()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert _said(code) == "[]"
    one = (
        "import time\n"
        "from headrace.cli.entry import build_parser\n"
        "build_parser(only='status').format_help()\n"
        "print(time.process_time())"
    )
    # the least of three: a crowded machine adds to processor time too, by caches that others have emptied
    assert min(float(_said(one)) for _ in range(3)) < 0.5


def _said(program: str) -> str:
    """What a Python of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`headrace COMMAND --help` says what the command is for and exits with 0."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert COMMANDS[command][1][1:20] in " ".join(capsys.readouterr().out.split())


def test_misspelt_names_are_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A wrong command, option, setting or topic exits with 2 and names the nearest right one."""
    with pytest.raises(SystemExit) as ended:
        main(["trajectroy", "x"])
    assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        main(["topics", "--run-dri", "x"])
    assert ended.value.code == 2
    assert main(["topics", "create", "--bus", f"sqlite:{tmp_path}/log", "--trainer.lrr", "3"]) == 2
    assert main(["topics", "create", "--bus", f"sqlite:{tmp_path}/log"]) == 0
    assert main(["tail", "promts", "--bus", f"sqlite:{tmp_path}/log"]) == 2
    told = capsys.readouterr().err
    for nearest in ("'trajectory'", "--run-dir", "'lr'", "'prompts'"):
        assert f"did you mean {nearest}?" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--from", "9@10"), "prompts: expected a partition in 0..3, got 9"),
        (("--type", "Promt"), "unknown type on prompts 'Promt': did you mean 'Prompt'?"),
    ],
)
def test_tail_refuses_what_can_show_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    """A partition that isn't there and a type the topic never carries exit with 2."""
    address = f"sqlite:{tmp_path}/log"
    assert main(["topics", "create", "--bus", address]) == 0
    assert main(["tail", "prompts", "--bus", address, *words]) == 2
    assert told in capsys.readouterr().err


def test_a_file_fault_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run directory that is a file ends the demo with its path and the reason."""
    (tmp_path / "file").touch()
    assert main(["demo", "--run-dir", str(tmp_path / "file"), "--plain"]) == 1
    assert capsys.readouterr().err == f"headrace: {tmp_path / 'file'}: File exists\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("rollouts", "--inference", "nonsense"), "expected HOST:PORT, got 'nonsense'"),
        (("tail", "prompts", "-n", "0"), "expected a whole number from 1, got '0'"),
        (("demo", "--workers", "0"), "expected a whole number from 1, got '0'"),
        (("evaluate", "--tasks", "x"), "expected a whole number from 1, got 'x'"),
    ],
)
def test_a_value_that_cannot_work_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    """An address without a port or a count below 1 exits with 2 before anything starts and waits."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_demo_takes_some_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A time that isn't above 0 is refused, and no run directory is made."""
    assert main(["demo", "--minutes=-1", "--run-dir", str(tmp_path / "run")]) == 2
    assert "--minutes: expected more than 0, got -1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_unknown_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """`tasks list` of a package that isn't in the set names the nearest."""
    assert main(["tasks", "list", "--package", "tolz"]) == 2
    assert "unknown package 'tolz': did you mean 'toolz'?" in capsys.readouterr().err


def test_dotted_flags_stand_anywhere() -> None:
    """Settings are taken out before the command's own arguments are read, a value is never a topic."""
    flags, words = split_dotted(["tail", "--trainer.lr", "3e-6", "prompts", "--run.group-size=4", "-n", "2"])
    assert flags == {"trainer.lr": "3e-6", "run.group_size": "4"}
    assert words == ["tail", "prompts", "-n", "2"]
    with pytest.raises(ConfigError, match=r"--trainer\.lr: expected a value"):
        split_dotted(["demo", "--trainer.lr"])


def test_looking_creates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that looks at a run that isn't there says so and leaves no file behind."""
    assert main(["topics", "--run-dir", str(tmp_path / "none")]) == 2
    assert main(["status", "--bus", f"sqlite:{tmp_path}/none.sqlite"]) == 2
    assert list(tmp_path.iterdir()) == []
    assert "expected a run" in capsys.readouterr().err


def test_a_run_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What misses a run says how one is made; done so, it is there, under the name of its directory; a second
    time changes nothing."""
    run_dir = tmp_path / "my run"
    assert main(["status", "--run-dir", str(run_dir)]) == 2
    assert f"a new one: headrace topics create --run-dir {run_dir}" in capsys.readouterr().err
    assert main(["topics", "create"]) == 2
    assert "expected --run-dir DIR" in capsys.readouterr().err
    assert main(["topics", "create", "--run-dir", str(run_dir), "--trainer.lr", "3e-6"]) == 0
    before = (run_dir / "run.toml").read_text()
    assert 'name = "my-run"' in before and "lr = 3e-06" in before
    assert main(["topics", "create", "--run-dir", str(run_dir)]) == 0
    assert main(["status", "--run-dir", str(run_dir)]) == 0
    assert (run_dir / "run.toml").read_text() == before


def test_a_wrong_choice_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A value that an option does not know is answered with those that it knows."""
    with pytest.raises(SystemExit) as ended:
        main(["feedback", "replay-log", "x", "--format", "emacs"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "argument --format: invalid choice: 'emacs'" in told and "vscode" in told


def test_absent_kafka_is_said_within_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a broker a command ends within 10 s, with exit code 4 and the address in one line."""
    importlib.import_module("headrace.bus.kafka")  # seconds on a crowded machine, and not the broker's doing
    started_s = time.monotonic()
    assert main(["topics", "--bus", "kafka:127.0.0.1:9"]) == 4
    assert time.monotonic() - started_s < 10
    told = capsys.readouterr().err
    assert "127.0.0.1:9" in told
    assert "Traceback" not in told


def test_completion_knows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The scripts for bash and zsh name each command."""
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert all(command in script for command in COMMANDS)


def test_documents_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Which has no infinity: a threshold that is not there is null."""
    nothing = float("nan")
    options.print_json({"thresholds": (float("inf"), 0.25), "change": [{"higher": nothing}], "at": Path("a")})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "thresholds": [None, 0.25],
        "change": [{"higher": None}],
        "at": "a",
    }


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """`headrace ... | head -1` ends quietly."""
    address = f"sqlite:{tmp_path}/log"
    assert main(["topics", "create", "--bus", address]) == 0
    command = f"{sys.executable} -m headrace topics --json --bus {address} | head -1"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_the_parser_of_one_command_is_that_of_all() -> None:
    """Loading one command only gives the same arguments as loading all of them."""
    words = ["tail", "prompts", "--json", "-n", "3"]
    one, every = build_parser(only="tail").parse_args(words), build_parser().parse_args(words)
    assert {k: v for k, v in vars(one).items() if k != "run"} == {
        k: v for k, v in vars(every).items() if k != "run"
    }
