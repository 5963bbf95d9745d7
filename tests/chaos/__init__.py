"""The chaos harness: a real run, faults drawn from a seed, and an independent verdict. Not tests.

    faults.py   what is done to whom, and when: a pure function of the seed
    crew.py     the real processes of a run, and the broker, tied to ours
    play.py     one run: start, faults, the cut, the drain
    verdict.py  what its log and store must hold afterwards
    table.py    what is told

`python -m chaos --help` (with `tests` on the path), or `make chaos`.
"""
