import stat

import pytest

from quant.atomic import atomic_directory
from quant.errors import QuantError
from tests.quant.files import names_in


@pytest.mark.parametrize("prepare", [lambda path: None, lambda path: path.mkdir()], ids=["absent", "empty"])
def test_the_directory_appears_whole_at_the_end(tmp_path, prepare):
    destination = tmp_path / "model"
    prepare(destination)

    with atomic_directory(destination) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "file").write_text("content")
        assert partial.parent == tmp_path
        assert not destination.exists() or not any(destination.iterdir())

    assert (destination / "sub" / "file").read_text() == "content"
    assert names_in(tmp_path) == ["model"]


def test_the_directory_is_as_readable_as_any_other(tmp_path):
    with atomic_directory(tmp_path / "model"):
        pass
    (tmp_path / "other").mkdir()

    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_missing_parents_are_made(tmp_path):
    with atomic_directory(tmp_path / "a" / "b" / "model") as partial:
        (partial / "file").touch()

    assert (tmp_path / "a" / "b" / "model" / "file").exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, QuantError("problem", "remedy")])
def test_nothing_is_left_after_an_error_or_ctrl_c(tmp_path, error):
    def interrupted():
        with atomic_directory(tmp_path / "model") as partial:
            (partial / "file").write_text("half")
            raise error

    with pytest.raises(type(error) if isinstance(error, QuantError) else error):
        interrupted()

    assert names_in(tmp_path) == []


def test_a_failing_file_system_is_a_quant_error_that_names_the_destination(tmp_path):
    def full():
        with atomic_directory(tmp_path / "model"):
            raise OSError(28, "No space left on device")

    with pytest.raises(QuantError, match=r"model was not written: .*No space left on device\. Check free space"):
        full()

    assert names_in(tmp_path) == []


def test_an_existing_destination_is_refused_and_untouched(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "file").write_text("mine")

    with pytest.raises(QuantError, match=r"model exists and is not empty"), atomic_directory(tmp_path / "model"):
        pytest.fail("the body must not run")

    assert (tmp_path / "model" / "file").read_text() == "mine"
    assert names_in(tmp_path) == ["model"]


@pytest.mark.parametrize("make", [lambda path: path.touch(), lambda path: path.symlink_to(path.parent)])
def test_a_file_or_link_as_destination_is_refused(tmp_path, make):
    make(tmp_path / "model")

    with pytest.raises(QuantError, match="exists and is not a folder"), atomic_directory(tmp_path / "model"):
        pytest.fail("the body must not run")


def test_a_destination_filled_meanwhile_is_not_replaced(tmp_path):
    def raced():
        with atomic_directory(tmp_path / "model"):
            (tmp_path / "model").mkdir()
            (tmp_path / "model" / "file").write_text("theirs")

    with pytest.raises(QuantError, match="model was not written"):
        raced()

    assert (tmp_path / "model" / "file").read_text() == "theirs"
    assert names_in(tmp_path) == ["model"]


def test_a_parent_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(QuantError, match="cannot be made"), atomic_directory(tmp_path / "file" / "model"):
        pytest.fail("the body must not run")
