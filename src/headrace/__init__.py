"""Headrace: event-streaming reinforcement learning around a log.

The seven folders that a reader sees first (`producers`, `consumers`, `streams`, `trainer`, `inference`,
`kernels`, `envs`) stand at the top of the repository and are imported as `headrace.<folder>` through links in
this one (docs/adr/0001-layout.md).
"""

__version__ = "0.1.0"
