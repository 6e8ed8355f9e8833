"""What works across lanes: small programs of 32 threads or more, each of which stores one word."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from .bench import launcher, program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]

# Each thread's word of the array is at R8:R9; its number is in R0.
START = """
S2R R0, SR_TID.X
IMAD.WIDE.U32 R8, R0, 0x4, RZ
IADD3 R8, P0, R8, c[0x0][0x160], RZ
IADD3.X R9, R9, c[0x0][0x164], RZ, P0, !PT
LDG.E R1, [R8.64]
"""
END = """
STG.E [R8.64], R1
EXIT
"""
AT = 5 * 16  # the address of the first line between the two


def run(middle: str, words: list[int], threads: int = 32) -> list[int]:
    return program(START + middle.strip() + END, threads, words)


WORDS = [100 + i for i in range(32)]


@pytest.mark.parametrize(
    ("instruction", "source"),
    [
        ("SHFL.IDX PT, R1, R1, 0x5, 0x1f", lambda i: 5),
        ("SHFL.BFLY PT, R1, R1, 0x1, 0x1f", lambda i: i ^ 1),
        ("SHFL.DOWN PT, R1, R1, 0x4, 0x1f", lambda i: i + 4 if i + 4 < 32 else i),
        ("SHFL.UP PT, R1, R1, 0x4, 0x0", lambda i: i - 4 if i >= 4 else i),
        ("SHFL.DOWN PT, R1, R1, 0x2, 0x181f", lambda i: i + 2 if i % 8 + 2 < 8 else i),
    ],
)
def test_a_shuffle_reads_from_the_lane_it_names(instruction, source):
    assert run(instruction, WORDS) == [WORDS[source(i)] for i in range(32)]


def test_a_shuffle_says_where_there_was_no_lane():
    middle = "SHFL.DOWN P1, R2, R1, 0x4, 0x1f\nSEL R1, R2, RZ, P1"
    assert run(middle, WORDS) == [WORDS[i + 4] if i < 28 else 0 for i in range(32)]


def test_votes_and_reductions_count_the_lanes_that_are_there():
    vote = "ISETP.LT.U32.AND P1, PT, R0, 0x3, PT\nVOTE.ANY R1, PT, P1"
    assert run(vote, WORDS) == [0b111] * 32
    assert run("REDUX.SUM UR4, R1\nMOV R1, UR4", WORDS[:20], threads=20) == [sum(WORDS[:20])] * 20
    least = "REDUX.MIN.S32 UR4, R1\nMOV R1, UR4"
    assert run(least, [2**32 - 7, *WORDS[1:]]) == [2**32 - 7] * 32


def test_paths_part_and_meet_again():
    """Odd lanes go one way, even lanes another; where they meet, all of them vote."""
    middle = f"""
        LOP3.LUT P1, RZ, R0, 0x1, RZ, 0xc0, !PT
        BSSY B0, {AT + 6 * 16:#x}
        @P1 BRA {AT + 5 * 16:#x}
        IADD3 R1, R1, 0x3e8, RZ
        BRA {AT + 6 * 16:#x}
        IADD3 R1, R1, 0x7d0, RZ
        BSYNC B0
        VOTE.ANY R2, PT, PT
        IADD3 R1, R1, R2, RZ
    """
    found = run(middle, WORDS)
    assert found == [(WORDS[i] + (2000 if i % 2 else 1000) + 2**32 - 1) % 2**32 for i in range(32)]


def test_a_barrier_waits_for_all_warps_of_a_block():
    """Each thread stores in shared memory, and reads what the thread at the other end has stored."""
    middle = """
        STS [R0.X4], R1
        BAR.SYNC 0x0
        IADD3 R2, -R0, 0x3f, RZ
        LDS R1, [R2.X4]
    """
    words = list(range(64))
    assert run(middle, words, threads=64) == words[::-1]


def test_two_host_threads_may_launch_one_kernel_at_once():
    """As MXNet's threads of two devices do: each launch has shared memory of its own."""
    launched = launcher(START + "STS [R0.X4], R1\nBAR.SYNC 0x0\nIADD3 R2, -R0, 0x3f, RZ\nLDS R1, [R2.X4]" + END)

    def wrong(first: int) -> int:
        words = list(range(first, first + 64))
        # Blocks one after the other turn the array around: an odd number of them.
        return sum(launched(64, words, 2001) != words[::-1] for _ in range(50))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wrong, (0, 1000))) == [0, 0]


def test_shared_memory_that_nobody_has_written_is_no_number():
    assert run("LDS R1, [R0.X4]", WORDS) == [0xFFFFFFFF] * 32


@pytest.mark.parametrize(("logic", "wanted"), [("AND", 0), ("OR", 1), ("POPC", 40)])
def test_a_barrier_reduces_over_all_warps_of_a_block(logic, wanted):
    middle = f"""
        ISETP.GE.U32.AND P1, PT, R0, 0x18, PT
        BAR.RED.{logic} 0x0, P1
        B2R.RESULT R1, P2
        {"NOP" if logic == "POPC" else "SEL R1, RZ, 0x1, !P2"}
    """
    assert run(middle, list(range(64)), threads=64) == [wanted] * 64


def test_lanes_that_wait_for_a_mask_go_on_together():
    middle = f"""
        ISETP.LT.U32.AND P1, PT, R0, 0x10, PT
        @!P1 BRA {AT + 5 * 16:#x}
        WARPSYNC 0xffff
        VOTE.ANY R2, PT, PT
        IADD3 R1, R1, R2, RZ
        NOP
    """
    assert run(middle, WORDS) == [WORDS[i] + (0xFFFF if i < 16 else 0) for i in range(32)]


# Each block takes the next free place of the array, and writes its number there.
QUEUE = """
S2R R0, SR_CTAID.X
MOV R2, 0x1
MOV R8, c[0x0][0x160]
MOV R9, c[0x0][0x164]
ATOMG.E.ADD.STRONG.GPU PT, R4, [R8.64], R2
IMAD.WIDE.U32 R10, R4, 0x4, RZ
IADD3 R10, P0, R10, R8, RZ
IADD3.X R11, R11, R9, RZ, P0, !PT
STG.E [R10.64+0x4], R0
EXIT
"""


@pytest.mark.parametrize("meets", ["", "BAR.SYNC 0x0"])
def test_blocks_run_in_the_grids_order_or_in_one_that_a_seed_draws(meets, monkeypatch):
    def order() -> list[int]:
        return program(f"{meets}{QUEUE}", 1, [0] * 41, blocks=40)[1:]

    monkeypatch.delenv("SIMGPU_SHUFFLE", raising=False)
    assert order() == list(range(40))
    found = {}
    for seed in "78":
        monkeypatch.setenv("SIMGPU_SHUFFLE", seed)
        found[seed] = order()
        assert sorted(found[seed]) == list(range(40))
        assert order() == found[seed]
    assert list(range(40)) != found["7"] != found["8"]
