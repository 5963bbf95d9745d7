"""Examples of a docstring as checks, and verdicts on what a program printed: by hand."""

import doctest

from headrace.envs.checks import Check, Outcome, checks_of, met, outcomes

VISIBLE = Check((), "f(1)\n", "1\n")
HIDDEN = Check((), "f(2)\n", "2\n", hidden=True)


def test_setup_goes_with_every_later_check() -> None:
    """Statements without an expected result run before each check after them, checks do not."""
    checks = checks_of(">>> x = 1\n>>> f(x)\n1\n>>> y = 2\n>>> f(y)\n2\n")
    assert [(check.setup, check.source, check.want) for check in checks] == [
        (("x = 1\n",), "f(x)\n", "1\n"),
        (("x = 1\n", "y = 2\n"), "f(y)\n", "2\n"),
    ]


def test_expected_exceptions_options_and_fences() -> None:
    """A traceback becomes the exception's line, options become flags, SKIP and fences are left out."""
    text = """
    ```pycon
    >>> f(-1)
    Traceback (most recent call last):
      ...
    ValueError: negative
    >>> f(9)  # doctest: +ELLIPSIS
    [1, ..., 9]
    >>> f(10)  # doctest: +SKIP
    10
    >>> f(3)
    3
    ```
    """
    raised, dotted, last = checks_of(text)
    assert (raised.want, raised.exception) == ("", "ValueError: negative\n")
    assert dotted.flags == doctest.ELLIPSIS
    assert last.want == "3\n"


def test_docstring_that_is_no_doctest() -> None:
    """An inconsistent indentation gives no checks, not an error."""
    assert checks_of("    >>> f(1)\n  1\n") == []


def test_met() -> None:
    """What was printed must be what is wanted; an exception only counts where one is expected."""
    raising = Check((), "f(-1)\n", exception="ValueError: negative\n")
    lenient = Check((), "f(-1)\n", exception="ValueError: any\n", flags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert met(VISIBLE, "out", "1\n")
    assert not met(VISIBLE, "out", "2\n")
    assert not met(VISIBLE, "exc", "1\n")
    assert met(raising, "exc", "ValueError: negative\n")
    assert not met(raising, "exc", "ValueError: else\n")
    assert not met(raising, "setup", "ValueError: negative\n")
    assert not met(raising, "out", "ValueError: negative\n")
    assert met(lenient, "exc", "ValueError: else\n")


def test_outcomes_tell_hidden_from_visible() -> None:
    """Frames of five candidates: all well; hidden wrong; both wrong; cut short by its time; undefined."""
    frames = [
        [0, -1, "loaded", ""],
        [0, 0, "out", "2\n"],
        [0, 1, "out", "1\n"],
        [1, -1, "loaded", ""],
        [1, 0, "out", "5\n"],
        [1, 1, "out", "1\n"],
        [2, -1, "loaded", ""],
        [2, 0, "exc", "KeyError: 'hidden'\n"],
        [2, 1, "out", "7\n"],
        [3, -1, "loaded", ""],
        [3, 0, "time", ""],
        [4, -1, "load", "SyntaxError: invalid syntax\n"],
    ]
    assert outcomes([HIDDEN, VISIBLE], 5, frames) == [
        Outcome("passed"),
        Outcome("failed", (0,), "5"),
        Outcome("error", (0, 1), "KeyError: 'hidden'", unmet_visible=1, got_visible="7"),
        Outcome("timeout", (0, 1), "processor time used up"),
        Outcome("error", (0, 1), "SyntaxError: invalid syntax", defined=False),
    ]
