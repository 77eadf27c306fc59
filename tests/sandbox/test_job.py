"""What goes into a run and what is read back, against anything that a run may have left there."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.sandbox.inside import program, wire
from verl_tool.sandbox.job import JobFiles, fetch, interleave

words = st.integers(0, (1 << 64) - 1) | st.integers(0, 100)


@given(st.binary(max_size=40), st.binary(max_size=40), st.lists(words, max_size=30))
def test_interleaving_keeps_every_byte_once_and_each_stream_in_order(
    out: bytes, err: bytes, journal: list[int]
) -> None:
    tagged_out, tagged_err = bytes(b & 0x7F for b in out), bytes(b | 0x80 for b in err)
    mixed = interleave(tagged_out, tagged_err, journal)
    assert bytes(b for b in mixed if b < 0x80) == tagged_out
    assert bytes(b for b in mixed if b >= 0x80) == tagged_err


@given(st.lists(st.tuples(st.integers(0, 1), st.binary(min_size=1, max_size=5)), max_size=20))
def test_interleaving_undoes_a_true_journal(writes: list[tuple[int, bytes]]) -> None:
    streams, journal, current = [b"", b""], [], 0
    for stream, data in writes:
        if stream != current:
            journal.append(len(streams[current]) << 1 | current)
            current = stream
        streams[stream] += data
    assert interleave(streams[0], streams[1], journal) == b"".join(data for _, data in writes)


@given(st.binary(), st.dictionaries(st.text("abc/.é", min_size=1, max_size=8), st.binary()))
def test_a_job_is_read_as_it_was_written(code: bytes, files: dict[str, bytes]) -> None:
    job = JobFiles(code, b"in", files)
    try:
        read = program.read_job(job.fds[0])
        assert (read.code, read.files) == (code, files)
        assert os.pread(job.fds[3], 10, 0) == b"in"
        assert job.state() == wire.NOT_STARTED
    finally:
        job.close()


@given(st.binary(max_size=300), st.binary(max_size=50), st.binary(max_size=50), st.integers(1, 40))
def test_output_is_read_whatever_the_journal_holds(journal: bytes, out: bytes, err: bytes, limit: int) -> None:
    job = JobFiles(b"", b"", {})
    try:
        os.pwrite(job.fds[0], journal, 0)
        os.pwrite(job.fds[1], out, 0)
        os.pwrite(job.fds[2], err, 0)
        output = job.output(limit)
        assert (output.stdout, output.stderr) == (out[:limit], err[:limit])
        assert sorted(output.interleaved) == sorted(out[:limit] + err[:limit])
        assert output.stdout_bytes >= len(out)
        assert isinstance(job.failure(), str)
    finally:
        job.close()


def test_a_failed_set_up_tells_why() -> None:
    job = JobFiles(b"", b"", {})
    try:
        os.pwrite(job.fds[0], wire.failure_journal(OSError(12, "no memory")), 0)
        assert job.state() == wire.SETUP_FAILED
        assert job.failure() == "OSError: [Errno 12] no memory"
    finally:
        job.close()


def test_fetching_stops_at_the_limit(tmp_path: pytest.TempPathFactory) -> None:
    folder = os.open(str(tmp_path), os.O_RDONLY)
    try:
        for name in ("a", "b", "c"):
            fd = os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=folder)
            os.write(fd, name.encode() * 10)
            os.close(fd)
        assert list(fetch(folder, ["a", "b", "c"], limit=25)) == ["a", "b"]
    finally:
        os.close(folder)


def test_the_journal_fits_its_place() -> None:
    assert (wire.FIRST_SWITCH + wire.SWITCHES) * 8 == wire.JOURNAL_BYTES
    assert len(wire.failure_journal(OSError("x" * 10_000))) < wire.JOURNAL_BYTES
    assert struct.unpack_from("<Q", wire.failure_journal(OSError()))[0] == wire.SETUP_FAILED
