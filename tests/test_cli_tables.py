"""CSV tables on the command line: columns, labels and faults, and every command on a table."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import NETS, failure, run, run_json
from torch import nn

import posthoc_uq as uq
from posthoc_uq.core.tables import csv_text, text_of_csv
from posthoc_uq.deployment import ScoreLog

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NAMES = ("age", "height", "income")
ROWS = 40


def net(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def inputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)


def targets() -> dict[str, list[Any]]:
    """Columns of targets, by what they are."""
    x = inputs()
    group = (x[:, 0] > -0.5).astype(int) + (x[:, 0] > 0.5)
    return {
        "price": [f"{value:.6g}" for value in x[:, 0] - x[:, 1]],
        "rent": [f"{value:.6g}" for value in 2 * x[:, 2]],
        "visits": np.random.default_rng(1).poisson(np.exp(x[:, 0])).tolist(),
        "kind": [("cat", "dog", "emu")[i] for i in group],
        "number": group.tolist(),
        "tall": (x[:, 1] > 0).astype(int).tolist(),
        "rich": (x[:, 2] > 0).astype(int).tolist(),
    }


def write(path: Path, columns: dict[str, Any], separator: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def table(path: Path, *names: str, **options: Any) -> Path:
    """The inputs, with some columns of targets between them."""
    values = {name: column.tolist() for name, column in zip(NAMES, inputs().T, strict=True)}
    own = {name: targets()[name] for name in names}
    return write(path, {"age": values["age"]} | own | values, **options)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def model(place: Path, name: str) -> list[Any]:
    return ["--model", f"{place / 'nets.py'}:{name}"]


def fitted(place: Path, data: Path, name: str, *options: Any) -> Path:
    own = ["--method", "kfac", "--keep-grams", "--prior-precision", 2]
    run("fit", data, *model(place, name), "-o", place / "p.h5", *own, *options)
    return place / "p.h5"


def loader(y: torch.Tensor) -> list[Any]:
    return [(torch.from_numpy(inputs()), y)]


@pytest.mark.parametrize(
    ("likelihood", "name", "columns", "measure"),
    [
        ("regression", "one", ["price"], "RMSE"),
        ("regression", "two", ["price", "rent"], "RMSE"),
        ("poisson", "one", ["visits"], "mean deviance"),
        ("multilabel", "two", ["tall", "rich"], "mAP"),
        ("heteroscedastic", "two", ["price"], "log density"),
        ("classification", "three", ["kind"], "accuracy"),
        ("ordinal", "one", ["number"], "RPS"),
        ("binary", "one", ["tall"], "accuracy"),
    ],
)
def test_a_table_is_what_python_gives(
    place: Path, likelihood: str, name: str, columns: list[str], measure: str
) -> None:
    data = table(place / "t.csv", *columns)
    targeted = [part for column in columns for part in ("--target", column)]
    labels, ordered = likelihood in ("classification", "ordinal", "binary"), likelihood == "ordinal"
    own = ["--likelihood", likelihood, *targeted]
    path = fitted(
        place, data, name, *own, *(["--likelihood-option", "thresholds=-0.5,0.5"] if ordered else [])
    )
    network = net({"one": 1, "two": 2, "three": 3}[name])
    found = targets()
    if columns == ["kind"]:
        y = torch.tensor(found["number"])  # cat, dog, emu in sorted order
    elif labels:
        y = torch.tensor(found[columns[0]])
    else:
        y = torch.tensor([[float(value) for value in found[column]] for column in columns]).T
    expected = uq.fit(
        network,
        loader(y),
        "kfac",
        likelihood=uq.Ordinal([-0.5, 0.5]) if ordered else likelihood,
        prior_precision=2,
        progress=False,
        keep_grams=True,
    )
    read = uq.load(path, network)
    for block in expected.blocks:
        torch.testing.assert_close(read.blocks[block].dense(), expected.blocks[block].dense())
    said = run_json("evaluate", path, data, *model(place, name))
    assert measure in said["quality"]["kfac, linearized"]
    # a table without the targets, in another order and with a column more, is predicted by the names
    values = dict(zip(NAMES, inputs().T.tolist(), strict=True))
    other = write(
        place / "new.csv",
        {"income": values["income"], "id": range(ROWS), "height": values["height"], "age": values["age"]},
    )
    run("predict", path, other, *model(place, name), "-o", place / "out.csv")
    out = rows_of(place / "out.csv")
    prediction = uq.wrap(network, read)(torch.from_numpy(inputs()))
    assert [row["file"] for row in out] == [str(i) for i in range(ROWS)]
    if "label_1" in out[0]:
        top = prediction.top_k(1)
        own_names = {"classification": ["cat", "dog", "emu"], "multilabel": columns}
        shown = own_names.get(likelihood, ["0", "1", "2"])
        assert [row["label_1"] for row in out] == [shown[i] for i in top.labels[:, 0].tolist()]
        given = [float(row["probability_1"]) for row in out]
        assert given == pytest.approx(top.probabilities[:, 0].tolist(), rel=1e-4)
    else:
        first = "mean" if prediction.mean.flatten().numel() == ROWS else "mean_1"
        given = [float(row[first]) for row in out]
        assert given == pytest.approx(prediction.mean.reshape(ROWS, -1)[:, 0].tolist(), rel=1e-4)


def test_every_command_on_a_table(place: Path) -> None:
    data = table(place / "t.tsv", "price", separator="\t")
    own = model(place, "one")
    path = fitted(place, data, "one", "--target", "price", "--likelihood", "regression", "--split", "[:30]")
    assert "table columns" in run("inspect", path).stdout
    before = run_json("inspect", path)["fit"]
    assert before["table columns"] == list(NAMES) and before["table targets"] == ["price"]
    run("tune", path, *own, "--data", data, "--split", "[30:]", "--referral-rate", 0.2)
    assert run_json("update", path, data, *own, "--split", "[30:]")["samples"] == ROWS
    assert run_json("update", "--remove", path, data, *own, "--split", "[30:]")["samples"] == 30
    assert run_json("inspect", path)["fit"]["table targets"] == ["price"]
    run("evaluate", path, data, *own, "--split", "[30:]", "--ood", f"same={data}")
    run("predict", path, data, *own, "--split", "[30:]", "--limit", 5, "-o", place / "out.csv")
    assert [row["file"] for row in rows_of(place / "out.csv")] == ["30", "32", "34", "36", "38"]


def test_columns_are_chosen(place: Path) -> None:
    data = table(place / "t.csv", "price", "kind", separator=";")
    own = ["--likelihood", "regression", "--target", "price"]
    fitted(place, data, "one", *own, "--columns", "age,height", "--columns", "income")
    arguments = ["fit", data, *model(place, "one"), "-o", place / "q.h5", "--likelihood", "regression"]
    said = failure(*arguments, "--target", "price")
    assert "line 2: the column 'kind' has the text '" in said and "--columns" in said
    said = failure(*arguments, "--target", "price", "--columns", "age,height")
    assert "the row has 2 columns: age, height, and its first linear layer takes 3; --columns chooses" in said
    assert "no column 'weight'; it has age, price, kind" in failure(*arguments, "--target", "weight")
    assert "Which column" in failure(*arguments)
    assert "'age' is named twice" in failure(*arguments, "--target", "price", "--columns", "age,age")
    assert "is a range of its rows" in failure(*arguments, "--target", "price", "--split", "train")
    assert "--target is of tables" in failure(
        "fit", f"{place / 'nets.py'}:one", *arguments[2:], "--target", "price"
    )


def test_a_posterior_takes_the_columns_of_its_fit(place: Path) -> None:
    data = table(place / "t.csv", "price")
    path = fitted(place, data, "one", "--likelihood", "regression", "--target", "price")
    own = model(place, "one")
    predict = ("predict", path, data, "-o", place / "out.csv")
    for command in (predict, ("evaluate", path, data), ("tune", path, "--data", data)):
        said = failure(*command, *own, "--columns", "age")
        assert "fitted on 3 columns (age, height, income)" in said and "leave out --columns" in said
    assert "leave out --columns" in failure("update", path, data, *own, "--columns", "height,age,income")
    run("update", path, data, *own, "--columns", ",".join(NAMES))
    (place / "text.csv").write_text("age,height,income\n1,2,3\n1,Rome,3\n")
    said = failure("predict", path, place / "text.csv", *own, "-o", place / "out.csv")
    assert "the column 'height' has the text 'Rome'" in said and "--columns" not in said


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ("1,2,,4", "line 3: the column 'income' has no value"),
        ("1,2,NA,4", "line 3: the column 'income' has no value"),
        ("1,2,inf,4", "line 3: the column 'income' has no value, or none that is finite"),
        ("1,2,1e60,4", "line 3: the column 'income' has no value, or none that is finite"),
        ("1,Rome,3,4", "line 3: the column 'height' has the text 'Rome'"),
        ("1,2,3", "line 3 has 3 cells, and the header 4"),
        ("1,2,3,", "line 3: the column 'price' has no value"),
    ],
)
def test_faults_name_row_and_column(place: Path, cells: str, words: str) -> None:
    path = place / "t.csv"
    path.write_text(f"age,height,income,price\n1,2,3,4\n{cells}\n")
    own = [*model(place, "one"), "-o", place / "p.h5", "--target", "price", "--likelihood", "regression"]
    assert words in failure("fit", path, *own)


def test_files_that_are_no_tables(place: Path) -> None:
    own = [*model(place, "one"), "-o", place / "p.h5", "--target", "price", "--likelihood", "regression"]
    path = place / "t.csv"
    assert "No such file" in failure("fit", path, *own)
    for content, words in (
        (b"", "is empty"),
        (b"age,price\n", "no rows below its header"),
        (b"age,age,price\n1,2,3\n", "two columns 'age'"),
        (b",age,price\n0,2,3\n", "Column 1 of"),
        (b"\xff\xfe\x00age", "not text in UTF-8"),
        (b"price\n1\n", "no column is left"),
    ):
        path.write_bytes(content)
        assert words in failure("fit", path, *own)


def test_labels(place: Path) -> None:
    own = [*model(place, "three"), "-o", place / "p.h5", "--force", "--target", "kind"]
    few = write(place / "few.csv", dict(zip(NAMES, [[1, 2]] * 3, strict=True)) | {"kind": ["dog", "cat"]})
    assert "2 different labels (cat, dog) and the model 3 classes" in failure("fit", few, *own)
    (place / "map.txt").write_text("dog\nemu\ncat\n")
    run("fit", few, *own, "--class-map", place / "map.txt", "--method", "diag")
    assert run_json("inspect", place / "p.h5")["fit"]["table classes"] == ["dog", "emu", "cat"]
    many = write(
        place / "many.csv", dict(zip(NAMES, [[1, 2, 3, 4]] * 3, strict=True)) | {"kind": list("abcd")}
    )
    assert "4 different labels" in failure("fit", many, *own)
    said = failure("evaluate", place / "p.h5", many, *model(place, "three"))
    assert "line 2: the label 'a' is none of the classes dog, emu, cat" in said
    assert "order is not known" in failure("fit", few, *own, "--likelihood", "ordinal")
    blank = write(place / "blank.csv", dict(zip(NAMES, [[1, 2]] * 3, strict=True)) | {"kind": ["dog", ""]})
    assert "line 3: the label is missing" in failure("fit", blank, *own)


def test_soft_labels_in_several_columns(place: Path) -> None:
    values = dict(zip(NAMES, inputs().T.tolist(), strict=True))
    shares = {"a": [0.5] * ROWS, "b": [0.25] * ROWS, "c": [0.25] * ROWS}
    data = write(place / "t.csv", values | shares)
    path = fitted(place, data, "three", *(part for name in "abc" for part in ("--target", name)))
    run("predict", path, data, *model(place, "three"), "-o", place / "out.csv")
    assert {row["label_1"] for row in rows_of(place / "out.csv")} <= {"a", "b", "c"}


def test_a_fit_without_labels(place: Path) -> None:
    fitted(place, table(place / "t.csv"), "three", "--unlabelled")
    said = failure("evaluate", place / "p.h5", table(place / "t.csv"), *model(place, "three"))
    assert "Which column" in said


def test_labels_that_no_class_has(place: Path) -> None:
    own = [*model(place, "three"), "-o", place / "p.h5", "--target", "kind", "--method", "diag"]
    features = dict(zip(NAMES, [[1, 2, 3]] * 3, strict=True))
    for label in ("1e30", "-1", "3", "9" * 40):
        said = failure("fit", write(place / "t.csv", features | {"kind": ["0", label, "1"]}), *own)
        assert "line 3: the label has the index" in said and "the model the classes 0 to 2" in said
    names = write(place / "t.csv", features | {"kind": ["x", "y", "z"]})
    for index in (10**30, 3):
        (place / "map.json").write_text(json.dumps({"x": 0, "y": 1, "z": index}))
        assert "line 4: the label has the index" in failure(
            "fit", names, *own, "--class-map", place / "map.json"
        )


def test_texts_are_no_formulas() -> None:
    for text in (
        "=1+1",
        "+x",
        "@SUM(A1)",
        "-x",
        "-1+1",
        "\tx",
        "\r=1",
        "\n=1",
        "'=1",
        "''-x",
        "\uff1dx",
        "-",
        "--1",
    ):
        cell = csv_text(text)
        assert cell == f"'{text}" and text_of_csv(cell) == text
    for text in ("", "a=1", "-3", "-3.5", "-1e-05", "3", "'", "'a", "cat", " =1", "a\t="):
        assert csv_text(text) == text == text_of_csv(text)


def test_a_table_for_spreadsheets_has_no_formulas(place: Path, tmp_path: Path) -> None:
    data = table(place / "t.csv", "number")
    path, own = fitted(place, data, "three", "--target", "number"), model(place, "three")
    (tmp_path / "names.json").write_text(json.dumps(["=HYPERLINK(1)", "-3", "@x"]))
    out, measures = tmp_path / "out.csv", tmp_path / "measures.csv"
    run("predict", path, data, *own, "-o", out, "--class-names", tmp_path / "names.json")
    assert {row[f"label_{i}"] for row in rows_of(out) for i in (1, 2, 3)} == {"'=HYPERLINK(1)", "-3", "'@x"}
    run("evaluate", path, data, *own, "--ood", f"@x={data}", "--csv", measures)
    assert "'@x" in {row["data"] for row in rows_of(measures)}
    log = ScoreLog(str(tmp_path / "log.csv"))
    log.add([{"label_1": "=1+1", "entropy": -0.5, "reason": "+a.png"}])
    log.close()
    text = (tmp_path / "log.csv").read_text()
    assert ",'=1+1," in text and ",-0.5," in text and ",'+a.png," in text
