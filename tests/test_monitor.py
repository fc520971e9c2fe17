"""Drift of scores, and the log that has them: false alarms, changes that are found, torn rows, a full disk."""

from __future__ import annotations

import json
import warnings
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posthoc_uq as uq
from posthoc_uq.app import Monitor, ScoreLog, Scores, drift_figure, monitor_for, read_scores


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


class TestMonitor:
    def test_the_mean_evidence_is_the_number_of_inputs(self) -> None:
        """Over all orders of the same scores, of which the first are held out: exactly, while nothing changed."""
        scores, held_out, limit = np.array([0.1, 0.2, 0.5, 1.0, 3.0, 4.0]), 2, 10_000
        found = [
            Monitor({"novelty": order[:held_out]}, limit)
            .add({"novelty": order[held_out:]})
            .evidence["novelty"]
            for order in map(np.array, permutations(scores))
        ]
        np.testing.assert_allclose(np.mean(found, axis=0), np.arange(1, 5) / limit, rtol=1e-10)

    @pytest.mark.parametrize("rows", [100, 200, 1000])
    def test_false_alarms_are_as_rare_as_stated(self, rows: int) -> None:
        """Over draws of the held-out inputs; one score has many equal values, the other follows it."""
        streams, inputs, every = 100, 1000, 1000
        random, alarms = np.random.default_rng(rows), 0
        for _ in range(streams):
            novelty = random.normal(size=rows + inputs)
            scores = {"novelty": novelty, "entropy": (novelty + random.normal(size=len(novelty))).round(1)}
            monitor = Monitor({name: values[:rows] for name, values in scores.items()}, every)
            alarms += len(monitor.add({name: values[rows:] for name, values in scores.items()}).alarms)
        assert 5 <= alarms <= streams * inputs / every

    def test_changes_are_found(self) -> None:
        random = np.random.default_rng(0)

        def delay(rows: int, changed: np.ndarray[Any, Any]) -> int:
            before = random.normal(size=500)
            watched = Monitor({"novelty": random.normal(size=rows)}).add(
                {"novelty": np.concatenate([before, changed])}
            )
            assert watched.alarms[0].input >= len(before)
            return watched.alarms[0].input - len(before)

        foreign = np.where(random.random(400) < 0.1, 6.0, random.normal(size=400))
        assert delay(1000, foreign) < 120 and delay(100, foreign) < 200  # a tenth of them
        assert delay(1000, random.normal(size=200) + 1) < 80
        assert delay(1000, 0.2 * random.normal(size=400)) < 200  # too much alike, which is drift, too
        assert delay(1000, np.full(100, 0.1)) < 60  # as of a camera that shows one picture

    def test_a_state_goes_on(self) -> None:
        random = np.random.default_rng(1)
        reference = {"novelty": random.normal(size=300), "entropy": random.integers(0, 9, 300) / 4}
        stream = {
            "novelty": np.concatenate([random.normal(size=300), random.normal(size=300) + 1]),
            "entropy": random.integers(0, 9, 600) / 4,
        }
        stream["entropy"][::7] = np.nan  # which tell nothing
        whole = Monitor(reference, 2000)
        watched = whole.add(stream)
        assert len(watched.alarms) > 2
        monitor, parts = Monitor(reference, 2000), list[Any]()
        for start, end in ((0, 1), (1, 290), (290, 290), (290, 417), (417, 600)):
            monitor = Monitor.resume(json.loads(json.dumps(monitor.state())))
            parts.append(monitor.add({name: values[start:end] for name, values in stream.items()}))
        assert [alarm for part in parts for alarm in part.alarms] == list(watched.alarms)
        for name, evidence in watched.evidence.items():
            joined = np.concatenate([part.evidence[name] for part in parts])
            np.testing.assert_allclose(joined, evidence, rtol=1e-9)
        assert monitor.inputs == 600 and monitor.evidence == pytest.approx(whole.evidence)
        assert monitor.false_alarm_every == 2000

    def test_many_held_out_scores_are_thinned(self) -> None:
        random = np.random.default_rng(2)
        held_out, incoming = random.normal(size=20_000).round(2), random.normal(size=5000).round(2)
        monitor = Monitor({"novelty": held_out}, 5000)
        assert len(monitor.reference["novelty"]) == 4096
        assert len(monitor.add({"novelty": incoming}).alarms) <= 1

    def test_the_table_and_the_figure(self) -> None:
        incoming, reference = _scores(450, 0.2, 0), _scores(300, 0.0, 1)
        monitor = monitor_for(incoming, reference)
        watched = monitor.add(incoming.values)
        assert len(watched.table().splitlines()) == 4
        assert "450 inputs; drift in " in watched.verdict and "novelty (since input" in watched.verdict
        panels = drift_figure(monitor, incoming, watched, reference.share_referred).axes
        labels = [panel.get_xlabel() for panel in panels]
        assert labels == ["entropy", "novelty", "inputs so far", "inputs so far"]
        marks = [line for line in panels[2].lines if line.get_marker() == "v"]
        drawn = sorted(place for line in marks for place in np.asarray(line.get_xdata()))
        assert drawn == sorted(alarm.input + 1 for alarm in watched.alarms)
        last, level = panels[-1].lines
        assert np.asarray(last.get_ydata())[-1] == incoming.referred[250:].mean()
        assert np.asarray(level.get_ydata())[0] == reference.share_referred

    def test_constant_scores(self) -> None:
        constant = Scores({"entropy": np.full(30, 0.5)}, np.full(30, np.nan))
        monitor = monitor_for(constant, constant)
        watched = monitor.add(constant.values)
        assert not watched.alarms and "no sign of drift" in watched.verdict
        assert drift_figure(monitor, constant, watched).axes and constant.share_referred is None

    def test_what_cannot_be_watched(self) -> None:
        monitor = Monitor({"novelty": np.arange(9.0)})
        for values in ({}, {"entropy": np.ones(3)}, {"novelty": np.ones((3, 2))}):
            with pytest.raises(uq.PosthocUQError, match="watches novelty"):
                monitor.add(values)
        with pytest.raises(uq.PosthocUQError, match="there are none"):
            Monitor({})
        state = monitor.state()
        state["scores"]["novelty"]["came"] = [1]
        with pytest.raises(uq.PosthocUQError, match="one count more"):
            Monitor.resume(state)


class TestReading:
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
        path.write_text('file,entropy\n"a, b",0.5\n\nlast,0.25')  # as others write CSVs
        assert read_scores(str(path)).values["entropy"].tolist() == [0.5, 0.25]
        with pytest.raises(uq.PosthocUQError, match="UTF-8"):
            path.write_bytes(b"\x89PNG\r\n")
            read_scores(str(path))
