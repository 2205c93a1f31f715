"""What `python -m benchmarks` says of arguments that are wrong."""

import pytest

from benchmarks.__main__ import main


@pytest.mark.parametrize(
    "arguments",
    [
        ("accuracy", "--seeds", "0"),
        ("cpu", "--tokens", "0"),
        ("cpu", "--cores", "-1"),
        ("cuda", "--repeats", "0"),
        ("rocm", "--heads", "8", "0"),
        ("scaling", "--devices", "0"),
        ("scaling", "--tokens", "1k"),
    ],
)
def test_counts_are_positive(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    message = f"{arguments[-1]!r} is not a positive whole number"
    assert message in capsys.readouterr().err


def test_cases_that_are_not_there(tmp_path):
    with pytest.raises(SystemExit, match=r"there is no file .*missing\.npz"):
        main(["accuracy", "--cases", str(tmp_path / "missing.npz")])
