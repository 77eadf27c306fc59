"""Reading Dockerfiles."""

from __future__ import annotations

import pytest

from verl_tool.sandbox.backends.dockerfile import read_instructions, replace_base_images

TEXT = """# syntax=docker/dockerfile:1
ARG BASE=python:3.12
FROM --platform=linux/amd64 ${BASE} AS builder

run one \\
  # a comment
  && two
RUN <<EOF cat > query.sql
SELECT *
FROM builder
EOF
COPY --from=builder a b
FROM builder
FROM debian:12
"""


def test_instructions() -> None:
    assert [(each.line, each.last_line, each.name, each.rest) for each in read_instructions(TEXT)] == [
        (2, 2, "ARG", "BASE=python:3.12"),
        (3, 3, "FROM", "--platform=linux/amd64 ${BASE} AS builder"),
        (5, 7, "RUN", "one  && two"),
        (8, 8, "RUN", "<<EOF cat > query.sql"),
        (12, 12, "COPY", "--from=builder a b"),
        (13, 13, "FROM", "builder"),
        (14, 14, "FROM", "debian:12"),
    ]


@pytest.mark.parametrize(
    ("images", "changes"),
    [
        ({}, {}),
        ({"ubuntu:*": "local:1"}, {}),
        ({"python:3.*": "local:1"}, {3: "FROM --platform=linux/amd64 local:1 AS builder"}),
        (
            {"debian:12": "local:1", "*": "local:2"},
            {3: "FROM --platform=linux/amd64 local:2 AS builder", 14: "FROM local:1"},
        ),
    ],
)
def test_other_base_images(images: dict[str, str], changes: dict[int, str]) -> None:
    expected = [changes.get(number, line) for number, line in enumerate(TEXT.splitlines(), 1)]
    assert replace_base_images(TEXT, images).splitlines() == expected
