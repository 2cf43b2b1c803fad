"""The findings of several ranks become one report: failures first, each with its ranks."""

from __future__ import annotations

from horovod_volo.core.errors import UserError
from horovod_volo.doctor.finding import Level, failure, merge_findings, ok, run_check, warning
from horovod_volo.doctor.report import Report

SLOW = warning("disk", "is slow", "Buy another.")
BROKEN = failure("network", "is down", "Plug it in.")


def report(*by_rank: list, ranks: int = 0) -> Report:
    hosts = tuple(f"h{rank // 2}" for rank in range(len(by_rank)))
    return Report(ranks or len(by_rank), hosts, "mpirun", "MPI", tuple(merge_findings(by_rank)))


def test_equal_findings_of_ranks_are_one() -> None:
    merged = merge_findings([[ok("a", "1"), SLOW], [ok("a", "2"), SLOW], [ok("a", "1"), BROKEN]])
    assert [(one.finding, one.ranks) for one in merged] == [
        (BROKEN, (2,)),
        (SLOW, (0, 1)),
        (ok("a", "1"), (0, 2)),
        (ok("a", "2"), (1,)),
    ]


def test_findings_of_a_subject_stay_together() -> None:
    merged = merge_findings([[ok("a", "1"), ok("b", "1")], [ok("a", "2"), ok("b", "1")]])
    assert [one.finding.subject for one in merged] == ["a", "a", "b"]


def test_a_finding_that_a_rank_repeats_is_merged() -> None:
    assert [one.ranks for one in merge_findings([[SLOW, SLOW], [SLOW]])] == [(0, 1)]


def test_the_text_is_aligned_and_names_the_ranks() -> None:
    by_rank = [[ok("disk", "there")], [ok("disk", "there"), BROKEN], [ok("disk", "there"), BROKEN, SLOW]]
    assert report(*by_rank).text().splitlines() == [
        "3 ranks on 2 hosts, mpirun (MPI)",
        "",
        "FAILURE  network  is down (ranks 1-2 of 3)",
        "                  -> Plug it in.",
        "",
        "warning  disk     is slow (rank 2 of 3)",
        "                  -> Buy another.",
        "",
        "ok       disk     there",
        "",
        "1 failure, 1 warning.",
    ]


def test_long_text_is_wrapped_in_its_column() -> None:
    lines = (
        report([warning("disk", "very " * 40 + "slow", "Buy " + "another " * 30)]).text().splitlines()[2:-2]
    )
    assert len(lines) > 4
    assert all(len(line) <= 110 for line in lines)
    assert all(line.startswith(" " * 15) for line in lines[1:])


def test_the_ranks_are_omitted_for_one_rank() -> None:
    assert "(rank" not in report([SLOW]).text()


def test_the_summary_counts() -> None:
    assert report([ok("a", "1")]).text().endswith("\nEverything is well.")
    assert report([SLOW]).text().endswith("\nNothing failed; 1 warning.")
    assert report([BROKEN, SLOW], [SLOW]).text().endswith("\n1 failure, 1 warning.")
    assert [report([one]).failed for one in (ok("a", "1"), SLOW, BROKEN)] == [False, False, True]


def test_ranks_that_did_not_report_are_counted() -> None:
    lines = report([ok("a", "1")], ranks=4).text().splitlines()
    assert lines[0] == "only rank 0 of 4 reported, mpirun (MPI)"
    assert lines[2] == "ok       a  1"


def test_the_record_is_complete() -> None:
    assert report([BROKEN], [SLOW]).record() == {
        "failures": 1,
        "warnings": 1,
        "ranks": 2,
        "hosts": ["h0", "h0"],
        "launcher": "mpirun",
        "controller": "MPI",
        "findings": [
            {"level": level, "subject": subject, "text": text, "remedy": remedy, "ranks": [rank]}
            for level, rank, subject, text, remedy in (
                ("failure", 0, "network", "is down", "Plug it in."),
                ("warning", 1, "disk", "is slow", "Buy another."),
            )
        ],
    }


def test_an_exception_in_a_check_is_a_failure() -> None:
    def user_error() -> list:
        raise UserError("It is missing. Install it. Then run again.")

    def broken() -> list:
        raise ImportError("libsomething.so: not found\nand more")

    assert run_check("thing", lambda: [SLOW]) == [SLOW]
    assert run_check("thing", user_error) == [
        failure("thing", "It is missing", "Install it. Then run again.")
    ]
    (found,) = run_check("thing", broken)
    assert found.level == Level.FAILURE
    assert found.text == "the check raised ImportError: libsomething.so: not found"
    assert found.remedy
