"""A small export of Nsight Systems."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

TABLES = {  # columns without types, so that SQLite keeps what is put in
    "StringIds": ("id, value", [(1, "volta_h884gemm_64x64"), (2, "volta_hgemm_128x64_nn"), (3, "Convolution")]),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        'start, "end", deviceId, correlationId, globalPid, demangledName',
        [(10, 30, 0, 1, 3 << 24, 1), (40, 45, 0, 2, 3 << 24, 2)],
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ('start, "end", globalTid, correlationId', [(5, 6, (3 << 24) + 7, 1)]),
    "NVTX_EVENTS": (
        'start, "end", eventType, text, globalTid, textId',
        [(0, 99, 59, "step", (3 << 24) + 7, None), (4, 8, 60, None, (3 << 24) + 7, 3)],
    ),
}


def write_database(path, changes=()):
    """``changes``: (table, row, column, value)."""
    Path(path).unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        for table, (columns, rows) in TABLES.items():
            database.execute(f"CREATE TABLE {table} ({columns})")
            cells = [list(row) for row in rows]
            for where, row, column, value in changes:
                if where == table:
                    cells[row % len(cells)][column % len(cells[0])] = value
            database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(cells[0]))})", cells)
        database.commit()
    return path
