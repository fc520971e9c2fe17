"""Drift of scores, and the log that has them: tests by their definition, torn rows, a full disk."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ks_2samp

import posthoc_uq as uq
from posthoc_uq.app import ScoreLog, Scores, drift_figure, drift_table, drifts, read_scores


def _row(label: str, novelty: float) -> dict[str, Any]:
    return {
        "time": "2030-01-02",
        "label_1": label,
        "entropy": 0.5,
        "novelty": novelty,
        "flag": True,
        "tail": 0.25,
    }


def _logged(path: Path, rows: list[tuple[str, float]]) -> bytes:
    """What a log holds with these rows at its end."""
    log = ScoreLog(str(path))
    log.add(_row(label, novelty) for label, novelty in rows)
    log.close()
    return path.read_bytes()


def _scores(count: int, shift: float, seed: int) -> Scores:
    random = np.random.default_rng(seed)
    entropy, novelty = random.beta(2, 5, count) + shift, 10 ** (random.normal(-2, 0.5, count) + 2 * shift)
    return Scores({"entropy": entropy, "novelty": novelty}, (entropy > 0.6).astype(float))


class TestLog:
    def test_a_torn_log_goes_on_with_a_whole_row(self, tmp_path: Path) -> None:
        path = tmp_path / "log.csv"
        before = _logged(path, [("cat", 1.0), ('the "emu", größer\nor so', 2.0)])
        whole = _logged(path, [("größer, «so»", 3.0)])
        for cut in range(
            len(before) + 1, len(whole)
        ):  # a row that lacks but its newline may lack digits, too
            path.write_bytes(whole[:cut])
            with pytest.warns(UserWarning, match=f"these {cut - len(before)} bytes were cut off"):
                log = ScoreLog(str(path))
            log.close()
            assert path.read_bytes() == before
        path.write_bytes(whole + b"\0" * 5000)  # what some file systems leave after a power cut
        with pytest.warns(UserWarning, match="5,000 bytes"):
            ScoreLog(str(path)).close()
        assert path.read_bytes() == whole
        assert read_scores(str(path)).values["novelty"].tolist() == [1.0, 2.0, 3.0]

    def test_a_torn_header_is_written_again(self, tmp_path: Path) -> None:
        path = tmp_path / "log.csv"
        _logged(path, [])
        header = path.read_bytes()
        for cut in range(len(header)):
            for rest in (b"", b"\0" * 300):
                path.write_bytes(header[:cut] + rest)
                assert len(_logged(path, [("cat", 1.0)]).splitlines()) == 2
                assert read_scores(str(path)).values["novelty"].tolist() == [1.0]
        for other in (b"time,file\n", b"time\n", b"times", header[:-1] + b",more\n", b"\n"):
            path.write_bytes(other)
            with pytest.raises(uq.PosthocUQError, match="other columns"):
                ScoreLog(str(path))
            assert path.read_bytes() == other

    def test_a_full_disk_tears_no_row(self, tmp_path: Path) -> None:
        import resource

        path = tmp_path / "log.csv"
        log = ScoreLog(str(path))
        log.add([_row("cat", 1.0)])
        before, kept = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, kept[1]))
            with pytest.raises(OSError):
                log.add([_row("dog", 2.0)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        assert path.read_bytes() == before
        log.add([_row("emu", 3.0)])
        assert read_scores(str(path)).values["novelty"].tolist() == [1.0, 3.0]
        path.write_bytes(b"")  # rotated in place
        log.add([_row("emu", 4.0)])
        log.close()
        assert read_scores(str(path)).values["novelty"].tolist() == [4.0]


class TestMonitoring:
    @pytest.mark.parametrize(
        ("count", "windows"), [(450, [(50, 250), (250, 450)]), (30, [(0, 30)]), (200, [(0, 200)])]
    )
    def test_windows_end_with_the_newest(self, count: int, windows: list[tuple[int, int]]) -> None:
        found = drifts(_scores(count, 0.0, 0), _scores(300, 0.0, 1))
        assert [(test.first, test.last) for test in found if test.score == "entropy"] == windows

    def test_drift_is_that_of_the_definition(self) -> None:
        incoming, reference = _scores(230, 0.1, 0), _scores(300, 0.0, 1)
        found = drifts(incoming, reference, 100)
        assert len(found) == 4  # two windows of two scores
        for test in found:
            values = np.sort(incoming.values[test.score][test.first : test.last])
            known = np.sort(reference.values[test.score])
            # the largest distance of the two empirical distribution functions, over all places where one steps
            places = np.concatenate([values, known])
            distance = max(abs((values <= p).mean() - (known <= p).mean()) for p in places)
            assert test.statistic == pytest.approx(distance)
            assert test.p_value == pytest.approx(ks_2samp(values, known).pvalue, rel=1e-9)
            assert test.alarm == (test.p_value < 0.01 / 4)
        assert drifts(_scores(19, 0.5, 0), reference, 100) == []
        with pytest.raises(uq.PosthocUQError, match="20 or more"):
            drifts(incoming, reference, 19)

    def test_false_alarms_are_rare_and_shifts_are_found(self) -> None:
        reference = _scores(1000, 0.0, 99)
        alarms = [any(t.alarm for t in drifts(_scores(500, 0.0, seed), reference, 100)) for seed in range(40)]
        assert sum(alarms) <= 4  # 0.01 of 40, and the reference is common to all
        assert all(t.alarm for t in drifts(_scores(500, 0.2, 5), reference, 250))

    def test_the_table_and_the_figure(self) -> None:
        incoming, reference = _scores(450, 0.2, 0), _scores(300, 0.0, 1)
        lines = drift_table(drifts(incoming, reference)).splitlines()
        assert len(lines) == 4 and all("yes" in line and "2 of 2" in line for line in lines[2:])
        panels = drift_figure(incoming, reference).axes
        assert [panel.get_xlabel() for panel in panels] == ["entropy", "novelty", "inputs so far"]
        last, level = panels[-1].lines
        assert last.get_ydata()[-1] == incoming.referred[250:].mean()
        assert level.get_ydata()[0] == reference.share_referred

    def test_constant_scores(self) -> None:
        constant = Scores({"entropy": np.full(30, 0.5)}, np.full(30, np.nan))
        found = drifts(constant, constant, 20)
        assert [test.alarm for test in found] == [False] and constant.share_referred is None
        assert drift_figure(constant, constant).axes

    def test_several_outputs_have_their_mean(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("standard_deviation_1,standard_deviation_2,mean_1\n1,3,7\n")
        assert read_scores(str(tmp_path / "a.csv")).values["standard_deviation"].tolist() == [2.0]

    def test_rows_that_are_torn_are_left_out_and_said(self, tmp_path: Path) -> None:
        path = tmp_path / "log.csv"
        first = _logged(path, [("cat", 1.0), ('the "emu"', 2.0)])
        rest = _logged(path, [("dog, big", 3.0), (', "emu"', 4.0)])[len(first) :]
        row = rest.splitlines(keepends=True)[0]
        faults = [
            row[:16] + b"\n",  # in the middle of a quote
            row[:12] + b"\n",
            row[:12] + row,  # two rows in one line
            b"\0" * 100 + b"\n",
            b"B\xc3\n",
            row.replace(b"3", b"3e"),
            row.replace(b",,1,", b",,yes,"),
        ]
        for fault in faults:
            path.write_bytes(first + fault + rest)
            with pytest.warns(UserWarning, match="torn or garbled") as said:
                found = read_scores(str(path))
            assert "line 4" in str(said[0].message) and len(said) == 1 and found.left_out == 1, fault
            assert found.values["novelty"].tolist() == [1.0, 2.0, 3.0, 4.0]
        path.write_bytes(b"".join([first, *faults, rest]))
        with pytest.warns(UserWarning, match="7 torn"):
            assert len(read_scores(str(path))) == 4
        for cut in range(len(first), len(first) + len(rest)):  # as `monitor` finds it while nothing mends it
            path.write_bytes((first + rest)[:cut])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = read_scores(str(path)).values["novelty"].tolist()
            assert found == [1.0, 2.0, 3.0, 4.0][: len(found)] and len(found) in (2, 3, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert read_scores(str(path), last=1).left_out == 0  # the newest alone
        path.write_text('file,entropy\n"a, b",0.5\n\nlast,0.25')  # as others write CSVs
        assert read_scores(str(path)).values["entropy"].tolist() == [0.5, 0.25]
        with pytest.raises(uq.PosthocUQError, match="UTF-8"):
            path.write_bytes(b"\x89PNG\r\n")
            read_scores(str(path))
