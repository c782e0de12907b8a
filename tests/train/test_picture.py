import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from piper_kernels.train.entropy import NgramEntropies
from piper_kernels.train.metrics import StepRecord
from piper_kernels.train.picture import draw_run, load_over_time

ENTROPIES = NgramEntropies(uniform=5.545, unigram=3.2, bigram=2.5, trigram=1.8)
RECORD = StepRecord(
    step=1,
    loss=5.0,
    balance_loss=None,
    learning_rate=1e-3,
    grad_norm=1.0,
    tokens=64,
    step_s=0.25,
    expert_counts=[[6, 2], [4, 4]],
)


def read_png(path: Path) -> np.ndarray:
    """Decode an 8-bit RGBA PNG far enough to see that it holds an image: its filtered rows."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, pixels, size = 8, b"", (0, 0)
    while position < len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        body = data[position + 8 : position + 8 + length]
        (crc,) = struct.unpack(">I", data[position + 8 + length : position + 12 + length])
        assert crc == zlib.crc32(kind + body)
        if kind == b"IHDR":
            size = struct.unpack(">II", body[:8])
            assert body[8:10] == bytes([8, 6])
        pixels += body if kind == b"IDAT" else b""
        position += 12 + length
    rows = np.frombuffer(zlib.decompress(pixels), dtype=np.uint8)
    return rows.reshape(size[1], 1 + 4 * size[0])


@pytest.mark.parametrize("num_steps", [1, 300])
def test_draw_run_writes_a_png(tmp_path: Path, num_steps: int) -> None:
    records = [replace(RECORD, step=step) for step in range(1, num_steps + 1)]
    records[-1] = replace(records[-1], held_out_loss=1.7)
    draw_run(tmp_path / "a.png", records, ENTROPIES, [0, 1], "title")
    rows = read_png(tmp_path / "a.png")
    assert rows.shape == (600, 1 + 4 * 1440)
    assert len(np.unique(rows)) > 50
    # what is drawn depends on the run
    records[0] = replace(records[0], expert_counts=[[0, 8], [8, 0]], loss=1.0)
    draw_run(tmp_path / "b.png", records, ENTROPIES, [0, 1], "title")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_load_over_time_sums_stretches_of_steps() -> None:
    records = [
        replace(RECORD, expert_counts=[[6, 2], [4, 4]]),
        replace(RECORD, expert_counts=[[2, 6], [8, 0]]),
        replace(RECORD, expert_counts=[[8, 0], [0, 0]]),
    ]
    # array_split puts the first two together
    load = load_over_time(records, max_columns=2)
    assert load.tolist() == [[1.0, 2.0], [1.0, 0.0], [1.5, 0.0], [0.5, 0.0]]
